"""Declares how a reader receives pages that do not arrive through the connection of its request."""

from __future__ import annotations

from typing import Protocol

from services.worker.exec.peers.connection import Connection


class PageReceiver(Protocol):
    """Receives the pages of one connection on one thread."""

    @property
    def transport(self) -> str:
        """Name of the transport in metrics."""

    def receive_into(self, connection: Connection, out: memoryview, deadline: float) -> bool:
        """Fills `out` with whole pages.

        Returns:
            False if the reservation was closed during the read.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
            Malformed: the server has sent an invalid mark.
        """

    def close(self) -> None: ...
