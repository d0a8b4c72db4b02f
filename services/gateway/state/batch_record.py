"""What is known of a batch. Frozen and plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

import orjson

from services.gateway.state.state_store import StoreAway


class BatchStatus(StrEnum):
    """OpenAI's."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class Unreadable(StoreAway):
    """It is there, and not for this gateway: another version has written it."""


OPEN = frozenset((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING))
USAGE = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a client has asked for, which does not change. key: name of the API key that asked, "" where there are none.
    created_at, expires_at: Unix seconds. output_id, error_id: that the files of its results will have. results_live_s: seconds
    from the batch's end, for those files."""

    id: str
    owner: str
    key: str
    endpoint: str
    input_file_id: str
    window: str
    created_at: int
    expires_at: int
    results_live_s: int
    output_id: str
    error_id: str
    metadata: dict[str, str] = field(default_factory=dict)

    def dumped(self) -> bytes:
        return orjson.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The order and how far it has come. times: Unix seconds in which it became what it is or was. total: lines of its input.
    last: number of the last one: blank ones count. completed, failed: lines with a result. output_bytes, error_bytes: of these
    results. usage: tokens by USAGE. errors: of the input, as OpenAI writes them. model: that all lines name, "" where they do
    not."""

    order: BatchOrder
    status: BatchStatus
    times: Mapping[BatchStatus, int]
    total: int
    last: int
    completed: int
    failed: int
    output_bytes: int
    error_bytes: int
    usage: Mapping[str, int]
    errors: list[dict[str, Any]]
    model: str

    @property
    def is_open(self) -> bool:
        return self.status in OPEN


def record_of(stored: Mapping[str, bytes]) -> BatchRecord:
    """stored: fields of the batch's hash. What another version has written beside it is left out. Raises Unreadable."""
    try:
        return _record_of(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"a batch cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _record_of(stored: Mapping[str, bytes]) -> BatchRecord:
    asked = orjson.loads(stored["order"])

    def number(name: str) -> int:
        return int(stored.get(name, b"0"))

    return BatchRecord(
        order=BatchOrder(**{each.name: asked[each.name] for each in fields(BatchOrder) if each.name in asked}),
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
