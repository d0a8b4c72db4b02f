"""A request's way through the scheduler, for whoever asks why it was slow: the last events of all requests, in one ring."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from itertools import islice

MAX_EVENTS = 16384


class TraceKind(enum.StrEnum):
    """What `detail` holds stands behind each."""

    QUEUED = "queued"  # prompt tokens
    GATED = "gated"  # prompt tokens; the grammar is being compiled
    UNGATED = "ungated"  # 0
    IMPORTING = "importing"  # prompt tokens that may come from another tier
    IMPORTED = "imported"  # those that came
    ADMITTED = "admitted"  # tokens that a prefix hit gave
    PREFILLED = "prefilled"  # tokens of KV once its last chunk, planned at this time, is computed
    JUMPED = "jumped"  # output tokens, with those the grammar has added
    RETRACTED = "retracted"  # output tokens kept
    PREEMPTED = "preempted"  # output tokens kept
    ENDED = "ended"  # output tokens


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """at: on the loop's clock, in seconds."""

    at: float
    request_id: str
    kind: TraceKind
    detail: int


class TraceLog:
    """now: set by the scheduler before anything can happen. Single writer: RequestLifecycle."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0  # of all events since the start
        self._events: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)

    def add(self, request_id: str, kind: TraceKind, detail: int) -> None:
        self._events.append(TraceEvent(self.now, request_id, kind, detail))
        self._count += 1

    def of(self, request_id: str) -> list[TraceEvent]:
        """Oldest first; empty for a request that is unknown, or whose events have left the ring."""
        return [event for event in self._events if event.request_id == request_id]

    def since(self, count: int) -> tuple[int, list[TraceEvent]]:
        """How many there have been, and those after the first `count`, oldest first, as far as they are in the ring."""
        assert 0 <= count <= self._count, "more events than there were"
        latest = list(islice(reversed(self._events), self._count - count))
        return self._count, latest[::-1]
