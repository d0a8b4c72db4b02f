"""The frames between a worker that reads KV pages and the worker that owns their reservation. Little-endian, of fixed sizes.

    reader                        server
    hello 48 | layout        ->
                             <-   answer 16 | sentence
    request 80, READ         ->
                             <-   answer 16 | pages
    request 80, LEAVE        ->   no answer
    request 80, STAGE        ->
                             <-   answer 16 | StagingArea (kv.proto); later pages go through it (nixl_staging.py)

Numbers are sizes in bytes. Over a Unix socket, the answer to a hello is followed by the 16 bytes and the descriptor of a ring,
through which the pages go (shared_ring.py).

A connection begins with a hello and has one request at a time. Magic and version are at the beginning of a hello of any version.
The payload of a refusal is a sentence: an error message in UTF-8, possibly empty.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from hashlib import blake2b

from rootstock_llm.services.worker.core.contracts.reservations import PROOF_BYTES, RESERVATION_SECRET_BYTES, KvReservation

VERSION = 1
DIGEST_BYTES = 32
MOST_LAYOUT_BYTES = 4096  # in a hello; the digest covers the whole layout
MOST_SENTENCE_BYTES = 16384
_MAGIC = b"RSTKVPGS"
_HELLO = struct.Struct(f"<8sII{DIGEST_BYTES}s")  # magic, version, bytes of the layout, digest
_REQUEST = struct.Struct(
    f"<B3xIQQ{RESERVATION_SECRET_BYTES}sI4x{PROOF_BYTES}s"
)  # kind, first, number, epoch, secret, count, proof
_ANSWER = struct.Struct("<B7xQ")  # status, bytes of the payload
_RING = struct.Struct("<I4xQ")  # slots, bytes of a slot
_ROOM = struct.Struct(f"<QQ{RESERVATION_SECRET_BYTES}s")
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
    NO_ROOM = 1  # no open reservation has this number, epoch and secret; a stranger learns nothing more
    OUT_OF_RANGE = 2  # the reservation does not have these pages
    OTHER_PROMPT = 3  # the proof is for another prompt
    TOO_LARGE = 4  # more bytes than one answer may have
    MALFORMED = 5  # the server does not understand the frame
    LAYOUT = 6  # the reader has another version or page layout
    NO_AREA = 7  # the server has no NIXL, or all its staging areas are in use


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The meaning of a page's bytes. Both sides must have the same layout."""

    name: bytes  # description of any length, readable for people
    page_size: int  # tokens
    page_bytes: int

    @property
    def digest(self) -> bytes:
        sizes = struct.pack("<QQ", self.page_size, self.page_bytes)
        return blake2b(sizes + self.name, digest_size=DIGEST_BYTES).digest()

    @property
    def told(self) -> bytes:
        """The readable form that a hello sends, at most MOST_LAYOUT_BYTES."""
        return (f"{self.page_size} tokens in {self.page_bytes} bytes: ".encode() + self.name)[:MOST_LAYOUT_BYTES]


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
    room: KvReservation
    first: int = 0  # first page; only with READ
    count: int = 0  # number of pages; only with READ
    proof: bytes = _NO_PROOF  # proof of the prompt up to the last page, only with READ; see reservations.py


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer."""

    status: Status
    payload_bytes: int = 0  # size of the payload after the frame


def pack_hello(layout: PageLayout) -> bytes:
    """Returns a hello and the layout after it."""
    return _HELLO.pack(_MAGIC, VERSION, len(layout.told), layout.digest) + layout.told


def parse_hello(frame: bytes | bytearray) -> Hello:
    """Returns a hello of any version. Raises Malformed."""
    magic, version, layout_bytes, digest = _HELLO.unpack(frame)
    if magic != _MAGIC:
        raise Malformed("this is a port for pages of KV")
    if layout_bytes > MOST_LAYOUT_BYTES:
        raise Malformed(f"the hello announces a layout of {layout_bytes} bytes; the limit is {MOST_LAYOUT_BYTES} bytes")
    return Hello(version, layout_bytes, digest)


def objection(hello: Hello, told: bytes | bytearray, layout: PageLayout) -> str:
    """Returns why the sender of a hello cannot read pages of this layout; empty if it can.

    Args:
        hello: the frame.
        told: the sender's layout, from the bytes after the frame.
        layout: layout of this worker.
    """
    if hello.version != VERSION:
        return f"it speaks version {VERSION} of the transport of pages, and was asked in version {hello.version}"
    if hello.digest != layout.digest:
        return f"its pages are {_text(layout.told)}; asked for were {_text(told)}"
    return ""


def pack_room(room: KvReservation) -> bytes:
    """Returns number, epoch and secret of a reservation, by which a reader names it. Raises ValueError if they do not fit."""
    if len(room.secret) != RESERVATION_SECRET_BYTES:
        raise ValueError(f"a room's secret has {RESERVATION_SECRET_BYTES} bytes, not {len(room.secret)}")
    try:
        return _ROOM.pack(room.number, room.epoch, room.secret)
    except struct.error as error:
        raise ValueError(f"no frame has room for this room: {error}") from error


def pack_request(request: PageRequest) -> bytes:
    """Returns the frame. Raises ValueError if a value does not fit into it."""
    if len(request.proof) != PROOF_BYTES:
        raise ValueError(f"a proof has {PROOF_BYTES} bytes, not {len(request.proof)}")
    number, epoch, secret = _ROOM.unpack(pack_room(request.room))
    try:
        return _REQUEST.pack(request.kind, request.first, number, epoch, secret, request.count, request.proof)
    except struct.error as error:
        raise ValueError(f"no frame has room for these pages: {error}") from error


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
        raise Malformed(f"nothing is answered by {status}") from error


def pack_ring(slots: int, slot_bytes: int) -> bytes:
    return _RING.pack(slots, slot_bytes)


def parse_ring(frame: bytes | bytearray) -> tuple[int, int]:
    """Returns (slots, slot_bytes) of a ring, unchecked."""
    slots, slot_bytes = _RING.unpack(frame)
    return slots, slot_bytes


def pack_sentence(sentence: str) -> bytes:
    return sentence.encode()[:MOST_SENTENCE_BYTES]


def parse_sentence(payload: bytes | bytearray) -> str:
    return _text(payload)


def _text(of: bytes | bytearray) -> str:
    return of.decode(errors="replace")
