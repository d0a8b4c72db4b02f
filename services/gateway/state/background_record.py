"""What is known of a response in the background, beside the response itself. Frozen and plain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

import orjson

from services.gateway.request.generation import ModelVersion
from services.gateway.state.background_past import BackgroundPast


class BackgroundStatus(StrEnum):
    """OpenAI's."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = frozenset((BackgroundStatus.QUEUED, BackgroundStatus.IN_PROGRESS))


@dataclass(frozen=True, slots=True)
class BackgroundOrder:
    """What a client has asked for, which does not change. key: name of the API key that asked, "" where there are none.
    routing_key: that came with it. created_at, ends_at: Unix seconds; it is over by then. model: its name. asked: the body,
    without its input. rendered_end: see Prompt. context_bytes: of the responses before it.

    What its model was then, whatever its workers and tokenizers say elsewhere. tokenizer: that its prompt's ids are of. formats,
    reasoning_marks: by which its output is read, see Parsing; formats by name, tools' and reasoning's. context_len: in tokens.
    defaults: of sampling parameters, by name. formats is None, and none of these is known, in what gateways before them wrote;
    these need rendered_end."""

    id: str
    owner: str
    key: str
    request_id: str
    routing_key: str
    created_at: int
    ends_at: int
    model: str
    asked: Mapping[str, Any]
    rendered_end: str
    context_bytes: int
    tokenizer: str = ""
    formats: Sequence[str] | None = None
    reasoning_marks: Sequence[int] = ()
    context_len: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def dumped(self) -> bytes:
        return orjson.dumps(asdict(self))

    @property
    def member(self) -> str:
        return f"{self.owner}:{self.id}"


def order_of(content: bytes) -> BackgroundOrder:
    """What another version has written beside it is left out. Raises ValueError or TypeError."""
    found = orjson.loads(content)
    return BackgroundOrder(**{each.name: found[each.name] for each in fields(BackgroundOrder) if each.name in found})


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new since the piece before. number: from 1, of the pieces of one response. events: JSON, each with its sequence
    number. offset: output ids before `ids`, which are 4 bytes each, little-endian. text: as the detokenizer gave it. logprobs: of
    `ids`, as LogprobRows; b"" where there are none. The others: see EarlierOutput."""

    number: int
    status: BackgroundStatus
    events: Sequence[bytes]
    offset: int = 0
    ids: bytes = b""
    text: str = ""
    logprobs: bytes = b""
    decoded: int = 0
    chars: int = 0
    shown: int = 0
    weights: Sequence[str] | None = None
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation's record with what has been said since that version. name: of the record."""

    name: str
    version: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a response that is over. talk: its conversation, if that goes on with it."""

    record: bytes
    talk: Talk | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a response stands. prompt: its ids, as those of a Piece. cancelled: its client wants no more of it. takes: gateways
    that have had it since it last ran for long. pieces: written so far. past: what they say, which is read by itself. The others:
    see EarlierOutput."""

    order: BackgroundOrder
    status: BackgroundStatus
    prompt: bytes
    cancelled: bool
    takes: int
    pieces: int
    past: BackgroundPast
    decoded: int = 0
    chars: int = 0
    shown: int = 0
    weights: ModelVersion | None = None
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Some of a response's events, and how many there are of them. status: of the response."""

    status: BackgroundStatus
    total: int
    events: Sequence[bytes]

    @property
    def is_over(self) -> bool:
        return self.status not in OPEN
