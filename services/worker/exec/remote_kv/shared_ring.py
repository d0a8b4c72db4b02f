"""Sends and receives pages on the same machine through a ring in shared memory, piece by piece.

A ring has several slots. A slot holds one piece, which is one or more pages. The ring is memory with a descriptor (memfd), which
the server sends over a Unix socket. The memory is sealed: its size cannot change, and only the server can write it. The server
fills a slot and sends the mark FILLED, a byte, over the socket. The reader copies the slot, and sends FREE if the slot is needed
again. Both sides copy at the same time, and a piece is still in the CPU cache when the reader copies it. If the reservation is
closed during the copy of a piece, the server sends BROKEN instead of FILLED, and the reader does not read the slot.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.transfers import I32
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.frames import Malformed

SLOTS = 4
SLOT_BYTES = 1 << 20  # size of a slot, and so of a piece; if a page is larger, each slot has the size of a page
MOST_RING_BYTES = 1 << 34  # largest ring that a reader accepts
FILLED, BROKEN, FREE = b"\1", b"\0", b"\1"  # marks; the server sends FILLED and BROKEN, the reader sends FREE
_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of <linux/fcntl.h>, which fcntl has since Python 3.13
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE


@dataclass(frozen=True, slots=True)
class RingShape:
    """The size of a ring."""

    slots: int
    slot_bytes: int  # a multiple of the page size

    @property
    def num_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def pieces(self, size: int) -> int:
        """Returns the number of pieces for `size` bytes."""
        return -(-size // self.slot_bytes)


def shape_for(page_bytes: int) -> RingShape:
    return RingShape(SLOTS, max(1, SLOT_BYTES // page_bytes) * page_bytes)


class RingWriter:
    """The server's side of the ring of one connection. `fd` is the descriptor for the reader."""

    def __init__(self, shape: RingShape) -> None:
        """Allocates the memory. Raises OSError, for example if the system does not support sealed memory."""
        self._shape = shape
        self.fd = os.memfd_create("kv-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, shape.num_bytes)
            self._memory = memoryview(mmap.mmap(self.fd, shape.num_bytes))
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.fd)
            raise

    def send(
        self,
        connection: Connection,
        head: bytes,
        pages: I32,
        page_bytes: int,
        copy: Callable[[I32, memoryview], bool],
        deadline: float,
    ) -> int:
        """Sends pages.

        Args:
            connection: connection for the marks.
            head: first frame of the response, sent before the first mark.
            pages: int32[n], pages of the pool.
            page_bytes: bytes of a page.
            copy: see page_senders.Copy.
            deadline: end of the whole call.

        Returns:
            Number of sent pages. It is less than n if `copy` has returned False. If it is 0, nothing was sent.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
            Exception: the errors of `copy`.
        """
        shape = self._shape
        at_once, pieces = shape.slot_bytes // page_bytes, shape.pieces(len(pages) * page_bytes)
        for piece in range(pieces):
            if piece >= shape.slots:
                receive_mark(connection, deadline)
            part = pages[piece * at_once : (piece + 1) * at_once]
            begin = piece % shape.slots * shape.slot_bytes
            if not copy(part, self._memory[begin : begin + len(part) * page_bytes]):
                if piece:
                    connection.send(BROKEN, deadline)
                    for _ in range(min(piece, pieces - shape.slots) - max(0, piece - shape.slots + 1)):
                        receive_mark(
                            connection, deadline
                        )  # receives the marks FREE of earlier pieces, so that none is left for the next read
                return piece * at_once
            connection.send(FILLED if piece else head + FILLED, deadline)
        return len(pages)

    def close(self) -> None:
        """Closes the descriptor. The memory is freed when the last mapping ends."""
        os.close(self.fd)


class RingReader:
    """Implements PageReceiver: the reader's side of the ring of one connection."""

    transport = "shm"

    def __init__(self, fd: int, shape: RingShape, page_bytes: int) -> None:
        """Maps the ring.

        Args:
            fd: descriptor of the memory. The caller may close it after this call.
            shape: size of the ring.
            page_bytes: bytes of a page.

        Raises:
            Malformed: the shape is invalid, or the memory is not sealed or smaller than the ring.
            OSError: the memory cannot be mapped.
        """
        if not (shape.slots > 0 and shape.slot_bytes > 0 and shape.slot_bytes % page_bytes == 0):
            raise Malformed(
                f"the ring has {shape.slots} slots of {shape.slot_bytes} bytes; a slot must have whole pages of {page_bytes}"
            )
        if shape.num_bytes > MOST_RING_BYTES:
            raise Malformed(f"the ring has {shape.num_bytes} bytes; the limit is {MOST_RING_BYTES} bytes")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size < shape.num_bytes:
            raise Malformed("the memory of the ring is not sealed, or is smaller than the ring")
        self._shape = shape
        memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, shape.num_bytes, prot=mmap.PROT_READ), np.uint8)
        self._slots = memory.reshape(shape.slots, shape.slot_bytes)

    def receive_into(self, connection: Connection, out: memoryview, deadline: float) -> bool:
        shape, target = self._shape, np.frombuffer(out, np.uint8)
        pieces = shape.pieces(len(target))
        for piece in range(pieces):
            mark = receive_mark(connection, deadline)
            if mark == BROKEN:
                return False
            if mark != FILLED:
                raise Malformed("the server sent an unknown mark instead of FILLED or BROKEN")
            part = target[piece * shape.slot_bytes : (piece + 1) * shape.slot_bytes]
            # Unlike an assignment to a slice, copyto() releases the interpreter lock.
            np.copyto(part, self._slots[piece % shape.slots, : len(part)])
            if piece + shape.slots < pieces:
                connection.send(FREE, deadline)
        return True

    def close(self) -> None:
        """Drops the mapping. The memory is freed when the last mapping ends."""
        self._slots = self._slots[:0]


def receive_mark(connection: Connection, deadline: float) -> bytes:
    """Receives a mark. Raises OSError; TimeoutError if the deadline has passed."""
    mark = bytearray(1)
    if not connection.receive_into(mark, deadline):
        raise ConnectionError("the connection ended within a response")
    return bytes(mark)
