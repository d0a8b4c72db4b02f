"""Immutable records of the state of a background response. RedisStore stores the response itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

import orjson

from rootstock_llm.services.gateway.generation.request import ModelVersion
from rootstock_llm.services.gateway.store.background_past import BackgroundPast


class BackgroundStatus(StrEnum):
    """The status of a response in OpenAI's API."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN = frozenset((BackgroundStatus.QUEUED, BackgroundStatus.IN_PROGRESS))


@dataclass(frozen=True, slots=True)
class BackgroundOrder:
    """A client's request for a background response. It never changes.

    The fields from `tokenizer` on describe the model at the time of the request. A gateway that continues the response uses
    them, because its own workers and tokenizers may describe the model differently. Orders of older gateways do not have these
    fields; `formats` is then None. The gateway that continues the response then uses its own description of the model, and reads
    the end of the prompt (`rendered_end`) to find the format of reasoning.
    """

    id: str
    owner: str  # owner_of(key)
    key: str  # name of the API key; "" if the gateway has no API keys
    request_id: str
    routing_key: str  # routing key of the request
    created_at: int  # Unix seconds
    ends_at: int  # Unix seconds; deadline of the response
    model: str  # name of the model that clients use
    asked: Mapping[str, Any]  # request body without its input
    rendered_end: str  # last characters of the rendered chat, see PromptInput
    context_bytes: int  # stored bytes of the earlier responses that this response continues
    tokenizer: str = ""  # tokenizer that made the ids of the prompt
    formats: Sequence[str] | None = None  # names of the formats of tool calls and of reasoning, see OutputFormats
    reasoning_marks: Sequence[int] = ()  # token ids of the opening and the closing mark of reasoning, see Parsing
    context_len: int = 0  # context length of the model in tokens
    defaults: Mapping[str, Any] = field(default_factory=dict)  # default sampling parameters of the model, by name

    def dumped(self) -> bytes:
        return orjson.dumps(asdict(self))

    @property
    def member(self) -> str:
        return f"{self.owner}:{self.id}"


def order_of(content: bytes) -> BackgroundOrder:
    """Returns a stored order, ignoring unknown fields of other versions. Raises ValueError or TypeError."""
    found = orjson.loads(content)
    return BackgroundOrder(**{each.name: found[each.name] for each in fields(BackgroundOrder) if each.name in found})


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of a response since its previous piece. EarlierOutput explains the fields from `decoded` on."""

    number: int  # number of the piece within its response, from 1
    status: BackgroundStatus
    events: Sequence[bytes]  # JSON, each with its sequence number
    offset: int = 0  # number of output ids before `ids`
    ids: bytes = b""  # output ids, 4 bytes each, little-endian
    text: str = ""  # text from the detokenizer, before it is parsed
    logprobs: bytes = b""  # LogprobRows of `ids`; b"" for none
    decoded: int = 0
    chars: int = 0
    shown: int = 0
    weights: Sequence[str] | None = None  # EarlierOutput.version
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class StoredConversationUpdate:
    """The new content of a conversation's record, which the end of a response writes."""

    name: str  # name of the record
    version: int  # version that the content extends
    content: bytes


@dataclass(frozen=True, slots=True)
class FinalRecords:
    """The records that the end of a response writes."""

    record: bytes  # record of the response
    conversation: StoredConversationUpdate | None = (
        None  # the extended conversation, or None if the response belongs to no conversation
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored state of a response that has not ended. EarlierOutput explains the fields from `decoded` on."""

    order: BackgroundOrder
    status: BackgroundStatus
    prompt: bytes  # ids of the prompt, 4 bytes each, little-endian
    cancelled: bool  # the client has cancelled the response
    takes: int  # gateways in a row that took the response, including this one; a run of SURVIVED_S restarts the count
    pieces: int  # number of stored pieces
    past: BackgroundPast  # reader of the stored pieces' content
    decoded: int = 0
    chars: int = 0
    shown: int = 0
    weights: ModelVersion | None = None  # EarlierOutput.version
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the events of a response."""

    status: BackgroundStatus  # status of the response
    total: int  # number of stored events of the response
    events: Sequence[bytes]  # events of this page

    @property
    def is_over(self) -> bool:
        return self.status not in OPEN
