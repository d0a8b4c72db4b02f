"""Packs and parses the frames between a worker that reads KV pages (reader) and the worker that reserves them (server).

    reader                        server
    hello 48 | layout        ->
                             <-   answer 16 | error message, if the status is not OK
    request 80, READ         ->
                             <-   answer 16 | pages
    request 80, LEAVE        ->   no answer
    request 80, STAGE        ->
                             <-   answer 16 | StagingArea (kv.proto); later pages go through it (nixl_staging.py)

Frames are little-endian and have fixed sizes. Numbers are sizes in bytes. Over a Unix socket, the answer to a hello is followed
by the 16 bytes and the descriptor of a ring, through which the pages go (shared_ring.py).

A connection begins with a hello and has one request at a time. A hello of any version begins with magic and version. If the
status of an answer is not OK, its payload is an error message in UTF-8, possibly empty.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from hashlib import blake2b

from rootstock_llm.services.worker.core.contracts.reservations import PROOF_BYTES, RESERVATION_SECRET_BYTES, KvReservation

VERSION = 1
DIGEST_BYTES = 32
MAX_LAYOUT_BYTES = 4096  # longest layout in a hello, which is cut there; the digest covers the uncut layout
MAX_ERROR_BYTES = 16384  # longest error message
_MAGIC = b"RSTKVPGS"
_HELLO = struct.Struct(f"<8sII{DIGEST_BYTES}s")  # magic, version, bytes of the layout, digest
_REQUEST = struct.Struct(
    f"<B3xIQQ{RESERVATION_SECRET_BYTES}sI4x{PROOF_BYTES}s"
)  # kind, first, number, epoch, secret, count, proof
_ANSWER = struct.Struct("<B7xQ")  # status, bytes of the payload
_RING = struct.Struct("<I4xQ")  # slots, bytes of a slot
_RESERVATION = struct.Struct(f"<QQ{RESERVATION_SECRET_BYTES}s")
_NO_PROOF = bytes(PROOF_BYTES)
HELLO_BYTES, REQUEST_BYTES, ANSWER_BYTES, RING_BYTES = _HELLO.size, _REQUEST.size, _ANSWER.size, _RING.size


class Malformed(ValueError):
    """Raised for bytes that are no valid frame. The message states the fault."""


class RequestKind(enum.IntEnum):
    """Kinds of requests. READ reads pages, LEAVE releases the reservation, STAGE requests a staging area for NIXL."""

    READ = 1
    LEAVE = 2
    STAGE = 3


class Status(enum.IntEnum):
    """Result of a request."""

    OK = 0
    NO_RESERVATION = 1  # no open reservation has this number, epoch and secret; the answer does not tell which one is wrong
    OUT_OF_RANGE = 2  # the reservation does not have these pages
    OTHER_PROMPT = 3  # the proof is for another prompt
    TOO_LARGE = 4  # more bytes than one answer may have
    MALFORMED = 5  # the frame is invalid
    LAYOUT = 6  # the reader has another version or page layout
    NO_AREA = 7  # the server has no NIXL, or all its staging areas are in use

    @property
    def label(self) -> str:
        """Name of the status in metrics and error messages."""
        return "no_room" if self is Status.NO_RESERVATION else self.name.lower()


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The meaning of a page's bytes. Both sides must have the same layout."""

    name: bytes  # readable description of any length
    page_size: int  # tokens
    page_bytes: int

    @property
    def digest(self) -> bytes:
        sizes = struct.pack("<QQ", self.page_size, self.page_bytes)
        return blake2b(sizes + self.name, digest_size=DIGEST_BYTES).digest()

    @property
    def description(self) -> bytes:
        """The readable form for a hello and error messages, at most MAX_LAYOUT_BYTES."""
        return (f"{self.page_size} tokens in {self.page_bytes} bytes: ".encode() + self.name)[:MAX_LAYOUT_BYTES]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of a connection."""

    version: int
    layout_bytes: int  # size of the layout after the frame
    digest: bytes


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for pages of a reservation."""

    kind: RequestKind
    reservation: KvReservation
    first: int = 0  # first page; only with READ
    count: int = 0  # number of pages; only with READ
    proof: bytes = _NO_PROOF  # proof of the prompt up to the last page, only with READ; see reservations.py


@dataclass(frozen=True, slots=True)
class Answer:
    """The fixed-size frame that begins an answer of the KV server: its status and the size of the payload that follows."""

    status: Status
    payload_bytes: int = 0  # size of the payload after the frame


def pack_hello(layout: PageLayout) -> bytes:
    """Returns a hello and the layout after it."""
    return _HELLO.pack(_MAGIC, VERSION, len(layout.description), layout.digest) + layout.description


def parse_hello(frame: bytes | bytearray) -> Hello:
    """Returns a hello of any version. Raises Malformed."""
    magic, version, layout_bytes, digest = _HELLO.unpack(frame)
    if magic != _MAGIC:
        raise Malformed("the first bytes are no hello; this port serves only reads of KV pages")
    if layout_bytes > MAX_LAYOUT_BYTES:
        raise Malformed(f"the hello announces a layout of {layout_bytes} bytes; the limit is {MAX_LAYOUT_BYTES} bytes")
    return Hello(version, layout_bytes, digest)


def objection(hello: Hello, description: bytes | bytearray, layout: PageLayout) -> str:
    """Returns why the sender of a hello cannot read pages of this layout; empty if it can.

    Args:
        hello: the frame.
        description: description of the sender's layout, from the bytes after the frame.
        layout: layout of this worker.
    """
    if hello.version != VERSION:
        return f"the server has version {VERSION} of the page transport; the reader has version {hello.version}"
    if hello.digest != layout.digest:
        return f"the server's pages are {_text(layout.description)}; the reader expects {_text(description)}"
    return ""


def pack_reservation(reservation: KvReservation) -> bytes:
    """Returns number, epoch and secret of a reservation, which a reader must send. Raises ValueError if a value does not fit."""
    if len(reservation.secret) != RESERVATION_SECRET_BYTES:
        raise ValueError(f"the secret of a reservation has {RESERVATION_SECRET_BYTES} bytes, not {len(reservation.secret)}")
    try:
        return _RESERVATION.pack(reservation.number, reservation.epoch, reservation.secret)
    except struct.error as error:
        raise ValueError(f"number or epoch of the reservation does not fit into a frame: {error}") from error


def pack_request(request: PageRequest) -> bytes:
    """Returns the frame. Raises ValueError if a value does not fit into it."""
    if len(request.proof) != PROOF_BYTES:
        raise ValueError(f"a proof has {PROOF_BYTES} bytes, not {len(request.proof)}")
    number, epoch, secret = _RESERVATION.unpack(pack_reservation(request.reservation))
    try:
        return _REQUEST.pack(request.kind, request.first, number, epoch, secret, request.count, request.proof)
    except struct.error as error:
        raise ValueError(f"the page numbers do not fit into a frame: {error}") from error


def parse_request(frame: bytes | bytearray) -> PageRequest:
    """Returns the request of a frame. Raises Malformed."""
    kind, first, number, epoch, secret, count, proof = _REQUEST.unpack(frame)
    try:
        return PageRequest(RequestKind(kind), KvReservation(number, epoch, secret), first, count, proof)
    except ValueError as error:
        raise Malformed(f"unknown kind of request: {kind}") from error


def pack_answer(answer: Answer) -> bytes:
    return _ANSWER.pack(answer.status, answer.payload_bytes)


def parse_answer(frame: bytes | bytearray) -> Answer:
    """Returns the answer of a frame. Raises Malformed."""
    status, payload_bytes = _ANSWER.unpack(frame)
    try:
        return Answer(Status(status), payload_bytes)
    except ValueError as error:
        raise Malformed(f"unknown status of an answer: {status}") from error


def pack_ring(slots: int, slot_bytes: int) -> bytes:
    return _RING.pack(slots, slot_bytes)


def parse_ring(frame: bytes | bytearray) -> tuple[int, int]:
    """Returns (slots, slot_bytes) of a ring. Does not check the values."""
    slots, slot_bytes = _RING.unpack(frame)
    return slots, slot_bytes


def pack_error(message: str) -> bytes:
    return message.encode()[:MAX_ERROR_BYTES]


def parse_error(payload: bytes | bytearray) -> str:
    return _text(payload)


def _text(utf8: bytes | bytearray) -> str:
    return utf8.decode(errors="replace")
