"""Packs and parses the frames between a worker that reads KV pages (reader) and the worker that reserves them (server).

    reader                        server
    hello 48 | layout        ->
                             <-   response 16 | error message, if the status is not OK
    request 80, READ         ->
                             <-   response 16 | pages
    request 80, LEAVE        ->   no response
    request 80, STAGE        ->
                             <-   response 16 | StagingArea (kv.proto); later pages go through this area (nixl_staging.py)

Frames are little-endian and have fixed sizes. The numbers are sizes in bytes. Over a Unix socket, the response to a hello is
followed by the description (16 bytes) and the descriptor of a ring in shared memory. Pages then go through the ring
(shared_ring.py).

A connection begins with a hello and has one request at a time. A hello of any version begins with magic and version. If the
status of a response is not OK, its payload is an error message in UTF-8, which may be empty.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from hashlib import blake2b

from rootstock_llm.services.worker.core.contracts.reservations import PROOF_BYTES, RESERVATION_SECRET_BYTES, KvReservation

VERSION = 1
DIGEST_BYTES = 32
MAX_LAYOUT_BYTES = 4096  # bytes to which the description of a layout is cut in a hello; the digest is of the whole layout
MAX_ERROR_BYTES = 16384  # longest error message in bytes
_MAGIC = b"RSTKVPGS"
_HELLO = struct.Struct(f"<8sII{DIGEST_BYTES}s")  # magic, version, bytes of the layout, digest
# kind, group, first page, number, epoch and secret of the reservation, count of pages, proof
_REQUEST = struct.Struct(f"<BB2xIQQ{RESERVATION_SECRET_BYTES}sI4x{PROOF_BYTES}s")
_RESPONSE = struct.Struct("<B7xQ")  # status, bytes of the payload
_RING = struct.Struct("<I4xQ")  # slots, bytes of a slot
_RESERVATION = struct.Struct(f"<QQ{RESERVATION_SECRET_BYTES}s")  # number, epoch, secret
_NO_PROOF = bytes(PROOF_BYTES)
HELLO_BYTES, REQUEST_BYTES, RESPONSE_BYTES, RING_BYTES = _HELLO.size, _REQUEST.size, _RESPONSE.size, _RING.size


class Malformed(ValueError):
    """Raised if received bytes are not a valid frame. The message states the fault."""


class RequestKind(enum.IntEnum):
    """Kinds of requests."""

    READ = 1  # read pages
    LEAVE = 2  # release the reservation
    STAGE = 3  # send later pages through a staging area for NIXL


class Status(enum.IntEnum):
    """Status of a response."""

    OK = 0
    NO_RESERVATION = 1  # no open reservation has this number, epoch and secret; which of them is wrong is not revealed
    OUT_OF_RANGE = 2  # the reservation does not have these pages
    OTHER_PROMPT = 3  # the proof is for another prompt
    TOO_LARGE = 4  # the pages have more bytes than one response may have
    MALFORMED = 5  # the frame is invalid
    LAYOUT = 6  # the reader has another version of the transport or another page layout
    NO_AREA = 7  # the server does not use NIXL, or all its staging areas are in use

    @property
    def label(self) -> str:
        """Name of the status in metrics and error messages."""
        return "no_room" if self is Status.NO_RESERVATION else self.name.lower()


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The meaning and the size of the bytes of a page. Reader and server must have equal layouts."""

    name: bytes  # KV layout (LoadedInfo.kv_layout), of any length
    page_size: int  # tokens
    page_bytes: int

    @property
    def digest(self) -> bytes:
        sizes = struct.pack("<QQ", self.page_size, self.page_bytes)
        return blake2b(sizes + self.name, digest_size=DIGEST_BYTES).digest()

    @property
    def description(self) -> bytes:
        """The text in a hello and in error messages, at most MAX_LAYOUT_BYTES."""
        return (f"{self.page_size} tokens in {self.page_bytes} bytes: ".encode() + self.name)[:MAX_LAYOUT_BYTES]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a connection."""

    version: int
    layout_bytes: int  # size of the layout's description after the frame
    digest: bytes  # PageLayout.digest


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for pages of a reservation, or for parts of its units."""

    kind: RequestKind
    reservation: KvReservation
    first: int = 0  # READ: index of the first page in the reservation, or of the first part among those of the group; otherwise 0
    count: int = 0  # READ: number of pages or parts; otherwise 0
    # READ: proof that the reader has the prompt up to the last page, or up to the page end of the units (reservations.py);
    # otherwise zeros.
    proof: bytes = _NO_PROOF
    group: int = 0  # READ: PageOperation.group. A worker without cache groups sends 0, as do workers of earlier versions.


@dataclass(frozen=True, slots=True)
class Response:
    """The frame with which each response of the server begins."""

    status: Status
    payload_bytes: int = 0  # size of the payload after the frame


def pack_hello(layout: PageLayout) -> bytes:
    """Returns a hello, and the description of the layout after it."""
    return _HELLO.pack(_MAGIC, VERSION, len(layout.description), layout.digest) + layout.description


def parse_hello(frame: bytes | bytearray) -> Hello:
    """Parses a hello of any version. Raises Malformed."""
    magic, version, layout_bytes, digest = _HELLO.unpack(frame)
    if magic != _MAGIC:
        raise Malformed("the connection does not begin with a hello; this port serves only reads of KV pages")
    if layout_bytes > MAX_LAYOUT_BYTES:
        raise Malformed(f"the layout of the hello has {layout_bytes} bytes; the limit is {MAX_LAYOUT_BYTES} bytes")
    return Hello(version, layout_bytes, digest)


def objection(hello: Hello, description: bytes | bytearray, layout: PageLayout) -> str:
    """Returns the reason why the sender of a hello cannot read pages of this worker, or an empty string if it can.

    Args:
        hello: the received hello.
        description: description of the sender's layout, received after the hello.
        layout: layout of this worker.
    """
    if hello.version != VERSION:
        return f"the server has version {VERSION} of the page transport; the reader has version {hello.version}"
    if hello.digest != layout.digest:
        return f"the server's pages are {_text(layout.description)}; the reader expects {_text(description)}"
    return ""


def pack_reservation(reservation: KvReservation) -> bytes:
    """Packs number, epoch and secret of a reservation. Raises ValueError if a value does not fit."""
    if len(reservation.secret) != RESERVATION_SECRET_BYTES:
        raise ValueError(
            f"the secret of a reservation has {len(reservation.secret)} bytes; it must have {RESERVATION_SECRET_BYTES}"
        )
    try:
        return _RESERVATION.pack(reservation.number, reservation.epoch, reservation.secret)
    except struct.error as error:
        raise ValueError(f"number or epoch of the reservation does not fit into a frame: {error}") from error


def pack_request(request: PageRequest) -> bytes:
    """Packs a request. Raises ValueError if a value does not fit."""
    if len(request.proof) != PROOF_BYTES:
        raise ValueError(f"the proof has {len(request.proof)} bytes; it must have {PROOF_BYTES}")
    number, epoch, secret = _RESERVATION.unpack(pack_reservation(request.reservation))
    try:
        return _REQUEST.pack(request.kind, request.group, request.first, number, epoch, secret, request.count, request.proof)
    except struct.error as error:
        raise ValueError(f"first page or count does not fit into a frame: {error}") from error


def parse_request(frame: bytes | bytearray) -> PageRequest:
    """Parses a request. Raises Malformed for an unknown kind."""
    kind, group, first, number, epoch, secret, count, proof = _REQUEST.unpack(frame)
    try:
        return PageRequest(RequestKind(kind), KvReservation(number, epoch, secret), first, count, proof, group)
    except ValueError as error:
        raise Malformed(f"the request has the unknown kind {kind}") from error


def pack_response(response: Response) -> bytes:
    return _RESPONSE.pack(response.status, response.payload_bytes)


def parse_response(frame: bytes | bytearray) -> Response:
    """Parses a response. Raises Malformed for an unknown status."""
    status, payload_bytes = _RESPONSE.unpack(frame)
    try:
        return Response(Status(status), payload_bytes)
    except ValueError as error:
        raise Malformed(f"the response has the unknown status {status}") from error


def pack_ring(slots: int, slot_bytes: int) -> bytes:
    return _RING.pack(slots, slot_bytes)


def parse_ring(frame: bytes | bytearray) -> tuple[int, int]:
    """Parses the description of a ring: (slots, slot_bytes). Does not check the values."""
    slots, slot_bytes = _RING.unpack(frame)
    return slots, slot_bytes


def pack_error(message: str) -> bytes:
    return message.encode()[:MAX_ERROR_BYTES]


def parse_error(payload: bytes | bytearray) -> str:
    return _text(payload)


def _text(utf8: bytes | bytearray) -> str:
    return utf8.decode(errors="replace")
