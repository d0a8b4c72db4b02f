"""The last events of all requests in one ring, which show why a request was slow."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from itertools import islice

MAX_EVENTS = 16384


class TraceKind(enum.StrEnum):
    """Kinds of events. The comments explain the event's `detail`."""

    QUEUED = "queued"  # prompt tokens
    GATED = "gated"  # prompt tokens; the grammar is being compiled
    UNGATED = "ungated"  # always 0
    IMPORTING = "importing"  # prompt tokens that may come from another tier
    IMPORTED = "imported"  # prompt tokens that came from another tier
    ADMITTED = "admitted"  # tokens that a prefix hit covered
    PREFILLED = "prefilled"  # tokens whose KV exists when the last chunk, which was planned now, is computed
    JUMPED = "jumped"  # output tokens, including the tokens that the grammar has added
    RETRACTED = "retracted"  # output tokens so far
    PREEMPTED = "preempted"  # output tokens so far
    ENDED = "ended"  # output tokens


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A transition of one request in the scheduler."""

    at: float  # seconds on the loop's clock
    request_id: str
    kind: TraceKind
    detail: int  # see TraceKind


class TraceLog:
    """The ring of events. RequestLifecycle writes it."""

    def __init__(self) -> None:
        self.now = 0.0  # time of the next events; Scheduler.submit(), plan() and commit() set it
        self._count = 0  # number of events since the start
        self._events: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)

    def add(self, request_id: str, kind: TraceKind, detail: int) -> None:
        self._events.append(TraceEvent(self.now, request_id, kind, detail))
        self._count += 1

    def of(self, request_id: str) -> list[TraceEvent]:
        """Returns the events of a request that are in the ring, oldest first."""
        return [event for event in self._events if event.request_id == request_id]

    def since(self, count: int) -> tuple[int, list[TraceEvent]]:
        """Returns the number of all events, and those after the first `count` that are in the ring, oldest first."""
        assert 0 <= count <= self._count, "more events than there were"
        latest = list(islice(reversed(self._events), self._count - count))
        return self._count, latest[::-1]
