"""Immutable records of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

import orjson

from rootstock_llm.services.gateway.store.state_store import StoreAway


class BatchStatus(StrEnum):
    """The status of a batch in OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Unreadable(StoreAway):
    """The batch exists, but a gateway of another version has written it, and this gateway cannot read it."""


OPEN = frozenset((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING))
USAGE = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """A client's request for a batch. It never changes."""

    id: str
    owner: str  # owner_of(key)
    key: str  # name of the API key; "" if the gateway has no API keys
    endpoint: str  # path of every line's operation
    input_file_id: str
    window: str  # completion window as the client wrote it
    created_at: int  # Unix seconds
    expires_at: int  # Unix seconds; deadline of the batch
    results_live_s: int  # lifetime of the result files after the end of the batch, in seconds
    output_id: str  # id of the future file of results
    error_id: str  # id of the future file of errors
    metadata: dict[str, str] = field(default_factory=dict)

    def dumped(self) -> bytes:
        return orjson.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch with its progress."""

    order: BatchOrder
    status: BatchStatus
    times: Mapping[BatchStatus, int]  # Unix seconds at which the batch reached each status
    total: int  # number of requests in the input
    last: int  # number of the last line of the input, from 1; blank lines count
    completed: int  # requests with a result in the output file
    failed: int  # requests with a result in the error file
    output_bytes: int  # size of the output file
    error_bytes: int  # size of the error file
    usage: Mapping[str, int]  # tokens, by the names of USAGE
    errors: list[dict[str, Any]]  # faults of the input, as OpenAI's API lists them
    model: str  # model of all lines; "" if lines name different models

    @property
    def is_open(self) -> bool:
        return self.status in OPEN


def record_of(stored: Mapping[str, bytes]) -> BatchRecord:
    """Returns a batch from the fields of its hash in Redis, ignoring unknown fields of other versions. Raises Unreadable."""
    try:
        return _record_of(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"the record of a batch is unreadable: {type(error).__name__}: {str(error)[:200]}") from error


def _record_of(stored: Mapping[str, bytes]) -> BatchRecord:
    order = orjson.loads(stored["order"])

    def number(name: str) -> int:
        return int(stored.get(name, b"0"))

    return BatchRecord(
        order=BatchOrder(**{each.name: order[each.name] for each in fields(BatchOrder) if each.name in order}),
        status=BatchStatus(stored["status"].decode()),
        times={status: number(f"at:{status.value}") for status in BatchStatus if f"at:{status.value}" in stored},
        total=number("total"),
        last=number("last"),
        completed=number("completed"),
        failed=number("failed"),
        output_bytes=number("bytes:output"),
        error_bytes=number("bytes:errors"),
        usage={name: number(f"usage:{name}") for name in USAGE},
        errors=orjson.loads(stored.get("errors", b"[]")),
        model=stored.get("model", b"").decode(),
    )
