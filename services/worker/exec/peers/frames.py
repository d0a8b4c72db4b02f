"""The bytes between a worker that reads pages of KV and the one whose rooms they are in. Little-endian, of fixed sizes.

    reader                        server
    hello 48 | layout        ->
                             <-   answer 16 | sentence
    request 80, READ         ->
                             <-   answer 16 | pages
    request 80, LEAVE        ->   no answer
    request 80, STAGE        ->
                             <-   answer 16 | StagingArea (kv.proto), through which pages go from here on (nixl_staging.py)

Over a Unix socket a ring's 16 bytes follow the answer to a hello, with its descriptor, and pages go through it (shared_ring.py).

A connection begins with a hello and has one request at a time under way. Magic and version stand at the beginning of a hello of
any version. Whatever refuses has a sentence for its payload, which may be empty.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from hashlib import blake2b

from services.worker.core.contracts.reservations import PROOF_BYTES, RESERVATION_SECRET_BYTES, KvReservation

VERSION = 1
DIGEST_BYTES = 32
MOST_LAYOUT_BYTES = 4096  # that are told; the digest is of all
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
    """What has come is none of these frames; in a sentence."""


class RequestKind(enum.IntEnum):
    READ = 1
    LEAVE = 2
    STAGE = 3


class Status(enum.IntEnum):
    """NO_ROOM: it is closed, or never was, or has another epoch or secret: who does not know a room learns nothing of it.
    NO_AREA: pages do not go through NIXL, or through as many connections as may be already."""

    OK = 0
    NO_ROOM = 1
    OUT_OF_RANGE = 2
    OTHER_PROMPT = 3
    TOO_LARGE = 4
    MALFORMED = 5
    LAYOUT = 6
    NO_AREA = 7


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What the bytes of a page mean: both sides have to mean the same. name: of any length, for people to read as well.
    page_size: tokens."""

    name: bytes
    page_size: int
    page_bytes: int

    @property
    def digest(self) -> bytes:
        sizes = struct.pack("<QQ", self.page_size, self.page_bytes)
        return blake2b(sizes + self.name, digest_size=DIGEST_BYTES).digest()

    @property
    def told(self) -> bytes:
        """At most MOST_LAYOUT_BYTES."""
        return (f"{self.page_size} tokens in {self.page_bytes} bytes: ".encode() + self.name)[:MOST_LAYOUT_BYTES]


@dataclass(frozen=True, slots=True)
class Hello:
    """layout_bytes: of what follows it."""

    version: int
    layout_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """first, count: pages, of READ alone, as is proof."""

    kind: RequestKind
    room: KvReservation
    first: int = 0
    count: int = 0
    proof: bytes = _NO_PROOF


@dataclass(frozen=True, slots=True)
class Answer:
    """payload_bytes: of what follows it."""

    status: Status
    payload_bytes: int = 0


def pack_hello(layout: PageLayout) -> bytes:
    """With the layout behind it."""
    return _HELLO.pack(_MAGIC, VERSION, len(layout.told), layout.digest) + layout.told


def parse_hello(frame: bytes | bytearray) -> Hello:
    """Of any version. Raises Malformed."""
    magic, version, layout_bytes, digest = _HELLO.unpack(frame)
    if magic != _MAGIC:
        raise Malformed("this is a port for pages of KV")
    if layout_bytes > MOST_LAYOUT_BYTES:
        raise Malformed(f"a layout of {layout_bytes} bytes is told; {MOST_LAYOUT_BYTES} are the most")
    return Hello(version, layout_bytes, digest)


def objection(hello: Hello, told: bytes | bytearray, layout: PageLayout) -> str:
    """Why who says this cannot read pages of that layout; empty if it can. told: of its own layout."""
    if hello.version != VERSION:
        return f"it speaks version {VERSION} of the transport of pages, and was asked in version {hello.version}"
    if hello.digest != layout.digest:
        return f"its pages are {_text(layout.told)}; asked for were {_text(told)}"
    return ""


def pack_room(room: KvReservation) -> bytes:
    """All that a reader has to know of it. Raises ValueError for what no frame has room for."""
    if len(room.secret) != RESERVATION_SECRET_BYTES:
        raise ValueError(f"a room's secret has {RESERVATION_SECRET_BYTES} bytes, not {len(room.secret)}")
    try:
        return _ROOM.pack(room.number, room.epoch, room.secret)
    except struct.error as error:
        raise ValueError(f"no frame has room for this room: {error}") from error


def pack_request(request: Request) -> bytes:
    """Raises ValueError for what no frame has room for."""
    if len(request.proof) != PROOF_BYTES:
        raise ValueError(f"a proof has {PROOF_BYTES} bytes, not {len(request.proof)}")
    number, epoch, secret = _ROOM.unpack(pack_room(request.room))
    try:
        return _REQUEST.pack(request.kind, request.first, number, epoch, secret, request.count, request.proof)
    except struct.error as error:
        raise ValueError(f"no frame has room for these pages: {error}") from error


def parse_request(frame: bytes | bytearray) -> Request:
    """Raises Malformed."""
    kind, first, number, epoch, secret, count, proof = _REQUEST.unpack(frame)
    try:
        return Request(RequestKind(kind), KvReservation(number, epoch, secret), first, count, proof)
    except ValueError as error:
        raise Malformed(f"nothing is asked by {kind}") from error


def pack_answer(answer: Answer) -> bytes:
    return _ANSWER.pack(answer.status, answer.payload_bytes)


def parse_answer(frame: bytes | bytearray) -> Answer:
    """Raises Malformed."""
    status, payload_bytes = _ANSWER.unpack(frame)
    try:
        return Answer(Status(status), payload_bytes)
    except ValueError as error:
        raise Malformed(f"nothing is answered by {status}") from error


def pack_ring(slots: int, slot_bytes: int) -> bytes:
    return _RING.pack(slots, slot_bytes)


def parse_ring(frame: bytes | bytearray) -> tuple[int, int]:
    """(slots, slot_bytes), whatever they are."""
    slots, slot_bytes = _RING.unpack(frame)
    return slots, slot_bytes


def pack_sentence(sentence: str) -> bytes:
    return sentence.encode()[:MOST_SENTENCE_BYTES]


def parse_sentence(payload: bytes | bytearray) -> str:
    return _text(payload)


def _text(of: bytes | bytearray) -> str:
    return of.decode(errors="replace")
