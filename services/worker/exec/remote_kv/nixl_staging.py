"""Sends and receives pages through a staging area: memory of the server that the reader reads with NIXL, piece by piece.

An area belongs to one connection and has SLOTS slots. Only the reader of this connection gets its address. The reader can read
the area at any time, so a slot has pages only while they are being sent:

1. The server copies a piece to private memory, and checks that the reservation is still open.
2. The server copies the piece to a slot, and sends the mark FILLED over the connection (shared_ring.py).
3. The reader reads the slot through NIXL, and sends the mark FREE.
4. The server fills the slot with zeros: at this mark, at the deadline, or when the connection ends.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import numpy as np
from google.protobuf.message import DecodeError

from rootstock_llm.protos import kv_pb2 as pb
from rootstock_llm.services.shared import limits
from rootstock_llm.services.worker.core.contracts.transfers import I32
from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.frames import Malformed, Response, Status
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier
from rootstock_llm.services.worker.exec.remote_kv.shared_ring import BROKEN, FILLED, FREE, RingShape, receive_mark

SLOTS = 4
SLOT_BYTES = 4 << 20  # size of a slot, and so of a piece; if a page is larger, each slot has the size of a page
NONCE_BYTES = 32  # random bytes with which the reader tests that it can read the area
PIECE_TIMEOUT_S = 2.0  # seconds for the read of a piece; short, so that time is left for a read over TCP
_ADDRESSES = 1 << 64  # bytes of an address space of 64 bits


class Unstaged(OSError):
    """Raised if pages cannot be read through NIXL over this connection. The message states the fault."""


def staging_shape(page_bytes: int) -> RingShape:
    return RingShape(SLOTS, max(1, SLOT_BYTES // page_bytes) * page_bytes)


class StagingSender:
    """Implements PageSender through a staging area."""

    def __init__(self, connection: Connection, page_bytes: int, carrier: Carrier, deadline: float) -> None:
        """Allocates the area. Raises OSError."""
        self._connection, self._page_bytes = connection, page_bytes
        shape = self._shape = staging_shape(page_bytes)
        self._own = memoryview(bytearray(shape.slot_bytes))
        self._area = carrier.area(shape.num_bytes, deadline)
        self._slots = self._area.data.reshape(shape.slots, shape.slot_bytes)
        self.description = self._describe().SerializeToString()  # serialized StagingArea, for the reader

    def send(self, pages: I32, copy: Callable[[I32, memoryview], bool], deadline: float) -> int:
        """See PageSender. Returns after the reader has read all pages."""
        shape, sent = self._shape, 0
        head = frames.pack_response(Response(Status.OK, len(pages) * self._page_bytes))
        at_once = shape.slot_bytes // self._page_bytes
        filled = emptied = 0  # number of pieces that were put into slots, and number of pieces that the reader has read
        while sent < len(pages):
            if filled - emptied == shape.slots:
                self._empty(emptied, deadline)
                emptied += 1
            part = pages[sent : sent + at_once]
            own = self._own[: len(part) * self._page_bytes]
            if not copy(part, own):
                if sent:
                    self._connection.send(BROKEN, deadline)
                break
            self._slots[filled % shape.slots, : len(own)] = np.frombuffer(own, np.uint8)
            self._connection.send(FILLED if sent else head + FILLED, deadline)
            filled, sent = filled + 1, sent + len(part)
        for piece in range(emptied, filled):
            self._empty(piece, deadline)
        return sent

    def close(self) -> None:
        self._area.close()

    def _empty(self, piece: int, deadline: float) -> None:
        """Waits for the reader's mark FREE, and fills the slot of the piece with zeros. Raises OSError or Malformed."""
        if receive_mark(self._connection, deadline) != FREE:
            raise Malformed("the reader sent an unknown mark instead of FREE")
        self._slots[piece % self._shape.slots] = 0

    def _describe(self) -> pb.StagingArea:
        """Writes a nonce into the area, with which the reader tests its reads, and returns the description of the area."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        written = self._area.data[:NONCE_BYTES]
        written[:] = np.frombuffer(nonce, np.uint8)[: len(written)]
        addresses = [self._area.address + slot * self._shape.slot_bytes for slot in range(self._shape.slots)]
        return pb.StagingArea(
            metadata=self._area.metadata, addresses=addresses, slot_bytes=self._shape.slot_bytes, nonce=written.tobytes()
        )


class StagingReceiver:
    """Implements PageReceiver through a staging area of the server and one slot of this worker's own memory.

    The own memory has pages only during a read.
    """

    transport = "nixl"

    def __init__(self, description: bytes, page_bytes: int, carrier: Carrier, deadline: float) -> None:
        """Tests that the server's area can be read, by a read of its nonce.

        Args:
            description: serialized StagingArea of the server.
            page_bytes: size of a page.
            carrier: carrier of this worker.
            deadline: end of the test.

        Raises:
            Unstaged: the test has failed.
        """
        shape = staging_shape(page_bytes)
        area = parse_area(description, page_bytes, shape.slot_bytes)
        self._addresses, self._slot_bytes = list(area.addresses), int(area.slot_bytes)
        try:
            self._area = carrier.area(shape.slot_bytes, deadline)
        except OSError as error:
            raise Unstaged(str(error)) from error
        try:
            self._area.load(area.metadata, deadline)
            self._read(0, len(area.nonce), deadline)
            if self._area.data[: len(area.nonce)].tobytes() != area.nonce:
                raise Unstaged("the bytes that were read through NIXL differ from the nonce in the description")
        except OSError as error:
            self._area.close()
            raise Unstaged(str(error)) from error

    def receive_into(self, connection: Connection, out: memoryview, deadline: float) -> bool:
        """See PageReceiver. Raises Unstaged if a read through NIXL fails. The connection then cannot be used any longer."""
        target = np.frombuffer(out, np.uint8)
        try:
            for piece, begin in enumerate(range(0, len(target), self._slot_bytes)):
                mark = receive_mark(connection, deadline)
                if mark == BROKEN:
                    return False
                if mark != FILLED:
                    raise Malformed("the server sent an unknown mark instead of FILLED or BROKEN")
                part = target[begin : begin + self._slot_bytes]
                self._read(piece % len(self._addresses), len(part), min(deadline, time.monotonic() + PIECE_TIMEOUT_S))
                np.copyto(part, self._area.data[: len(part)])
                connection.send(FREE, deadline)
            return True
        finally:
            self._area.wipe()

    def close(self) -> None:
        self._area.close()

    def _read(self, slot: int, size: int, deadline: float) -> None:
        """Reads `size` bytes of a slot of the server into this worker's own memory. Raises Unstaged."""
        try:
            self._area.read(self._addresses[slot], size, deadline)
        except OSError as error:
            raise Unstaged(str(error)) from error


def parse_area(description: bytes, page_bytes: int, max_slot_bytes: int) -> pb.StagingArea:
    """Parses and checks a StagingArea. Raises Unstaged if it is invalid, or does not fit the page size."""
    area = pb.StagingArea()
    try:
        area.ParseFromString(description)
    except DecodeError as error:
        raise Unstaged("the server's description of the staging area cannot be parsed as StagingArea") from error
    if not 0 < len(area.metadata) <= limits.MAX_NIXL_METADATA_BYTES or not 0 < len(area.addresses) <= limits.MAX_STAGING_SLOTS:
        raise Unstaged(
            f"the staging area has an invalid number of slots ({len(area.addresses)}) or bytes of metadata ({len(area.metadata)})"
        )
    if not 0 < area.slot_bytes <= max_slot_bytes or area.slot_bytes % page_bytes:
        raise Unstaged(
            f"a slot has {area.slot_bytes} bytes; it must have whole pages of {page_bytes} bytes, and at most {max_slot_bytes}"
        )
    if not 0 < len(area.nonce) <= min(NONCE_BYTES, area.slot_bytes) or max(area.addresses) > _ADDRESSES - area.slot_bytes:
        raise Unstaged("the staging area has a nonce of invalid size, or an invalid address")
    return area
