"""How a reader takes pages that do not come through the connection on which it has asked for them."""

from __future__ import annotations

from typing import Protocol

from services.worker.exec.peers.connection import Connection


class PageReceiver(Protocol):
    """Of one connection and one thread. transport: its name in metrics."""

    @property
    def transport(self) -> str: ...

    def receive_into(self, connection: Connection, out: memoryview, deadline: float) -> bool:
        """Fills `out`, which is whole pages. False: what was read may not have been. Raises OSError, TimeoutError, Malformed."""

    def close(self) -> None: ...
