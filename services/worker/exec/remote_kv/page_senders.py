"""Sends pages to the reader of a connection, through its socket or through a ring in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rootstock_llm.services.worker.core.contracts.transfers import I32
from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.frames import Response, Status
from rootstock_llm.services.worker.exec.remote_kv.shared_ring import RingWriter, shape_for

REUSED_BYTES = 16 << 20  # largest buffer that is kept for the next read; filling new memory is several times slower
Copy = Callable[[I32, memoryview], bool]
"""Copies pages of a reservation. Called with page ids, int32[n], and the buffer for their bytes.

Returns False if the copied bytes must not be sent, because the reservation was closed."""


class PageSender(Protocol):
    """Sends the pages of one connection on one thread."""

    def send(self, pages: I32, copy: Copy, deadline: float) -> int:
        """Sends a response with the pages, or with the first pages until `copy` returns False.

        Returns:
            Number of sent pages. If it is 0, no response was sent.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
            Exception: the errors of `copy`.
        """

    def close(self) -> None: ...


class SocketSender:
    """Implements PageSender through the socket. It copies all pages of a request before it sends the first one."""

    def __init__(self, connection: Connection, page_bytes: int) -> None:
        self._connection, self._page_bytes = connection, page_bytes
        self._buffer = memoryview(bytearray())

    def send(self, pages: I32, copy: Copy, deadline: float) -> int:
        size = len(pages) * self._page_bytes
        out = self._buffer if size <= len(self._buffer) else memoryview(bytearray(size))
        if size <= REUSED_BYTES:
            self._buffer = out
        if not copy(pages, out[:size]):
            return 0
        self._connection.send(frames.pack_response(Response(Status.OK, size)), deadline)
        self._connection.send(out[:size], deadline)
        return len(pages)

    def close(self) -> None:
        self._buffer = memoryview(b"")


class RingSender:
    """Implements PageSender through a ring in shared memory."""

    def __init__(self, connection: Connection, page_bytes: int, deadline: float) -> None:
        """Allocates the ring and sends its descriptor to the reader. Raises OSError."""
        self._connection, self._page_bytes = connection, page_bytes
        shape = shape_for(page_bytes)
        self._ring = RingWriter(shape)
        try:
            connection.send_with_fd(self._ring.fd, frames.pack_ring(shape.slots, shape.slot_bytes), deadline)
        except OSError:
            self._ring.close()
            raise

    def send(self, pages: I32, copy: Copy, deadline: float) -> int:
        head = frames.pack_response(Response(Status.OK, len(pages) * self._page_bytes))
        return self._ring.send(self._connection, head, pages, self._page_bytes, copy, deadline)

    def close(self) -> None:
        self._ring.close()
