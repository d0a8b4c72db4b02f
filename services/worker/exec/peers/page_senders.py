"""How a server hands pages over to who has asked for them on a connection: through its socket, or through a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.worker.core.contracts.transfers import I32
from services.worker.exec.peers import frames
from services.worker.exec.peers.connection import Connection
from services.worker.exec.peers.frames import Answer, Status
from services.worker.exec.peers.shared_ring import RingWriter, shape_for

KEPT_BYTES = 16 << 20  # of a copy whose memory is used anew: what is touched for the first time is filled several times as slowly
Copy = Callable[[I32, memoryview], bool]
"""(pages int32[n], out): fills `out` with their bytes. False: nobody may have them any more."""


class PageSender(Protocol):
    """Of one connection and one thread."""

    def send(self, pages: I32, copy: Copy, deadline: float) -> int:
        """An answer with the pages, or with as many of them as `copy` gives; of which there are none, no answer. Returns how
        many. Raises OSError, TimeoutError, and what copy raises."""

    def close(self) -> None: ...


class SocketSender:
    """All of them are copied before any is sent."""

    def __init__(self, connection: Connection, page_bytes: int) -> None:
        self._connection, self._page_bytes = connection, page_bytes
        self._kept = memoryview(bytearray())

    def send(self, pages: I32, copy: Copy, deadline: float) -> int:
        size = len(pages) * self._page_bytes
        out = self._kept if size <= len(self._kept) else memoryview(bytearray(size))
        if size <= KEPT_BYTES:
            self._kept = out
        if not copy(pages, out[:size]):
            return 0
        self._connection.send(frames.pack_answer(Answer(Status.OK, size)), deadline)
        self._connection.send(out[:size], deadline)
        return len(pages)

    def close(self) -> None:
        self._kept = memoryview(b"")


class RingSender:
    def __init__(self, connection: Connection, page_bytes: int, deadline: float) -> None:
        """Gives the ring to the reader. Raises OSError."""
        self._connection, self._page_bytes = connection, page_bytes
        shape = shape_for(page_bytes)
        self._ring = RingWriter(shape)
        try:
            connection.send_with(self._ring.fd, frames.pack_ring(shape.slots, shape.slot_bytes), deadline)
        except OSError:
            self._ring.close()
            raise

    def send(self, pages: I32, copy: Copy, deadline: float) -> int:
        head = frames.pack_answer(Answer(Status.OK, len(pages) * self._page_bytes))
        return self._ring.send(self._connection, head, pages, self._page_bytes, copy, deadline)

    def close(self) -> None:
        self._ring.close()
