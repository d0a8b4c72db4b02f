"""Decides when the requests of a trace are sent. The turns of a session are sent in sequence."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

from rootstock_llm.services.sim.core.trace.trace import Trace


class Arrivals(Protocol):
    """The order and the times in which requests are sent. Requests are named by their index in the trace."""

    def due(self, now: float) -> list[int]:
        """Returns the requests to send by `now`, in order, and counts them as sent. Returns each request once."""
        ...

    def ended(self, index: int, now: float) -> None:
        """Records that a sent request has ended."""
        ...

    def next_at(self) -> float | None:
        """Returns the time at which the next request is sent if no open request ends before.

        None: no request is left, or the next request is sent only after an open request has ended.
        """
        ...

    @property
    def num_unsent(self) -> int: ...


class Turns:
    """The order of the requests within sessions."""

    def __init__(self, trace: Trace) -> None:
        self.first: list[int] = []
        self._next: dict[int, int] = {}
        last: dict[str, int] = {}
        for index, request in enumerate(trace.requests):
            if request.session and request.session in last:
                self._next[last[request.session]] = index
            else:
                self.first.append(index)
            if request.session:
                last[request.session] = index

    def after(self, index: int) -> int | None:
        return self._next.get(index)


class OpenLoop:
    """Sends requests at their arrivals, independent of the worker's load. `speed` divides the arrival times.

    A later turn of a session is not sent before think_s seconds have passed since the end of the session's previous turn.
    """

    def __init__(self, trace: Trace, speed: float = 1.0) -> None:
        if not speed > 0:
            raise ValueError("speed must be above 0")
        self._requests, self._speed = trace.requests, speed
        self._turns = Turns(trace)
        self._heap = [(self._requests[index].arrival / speed, index) for index in self._turns.first]
        heapq.heapify(self._heap)
        self.num_unsent = len(trace.requests)

    def due(self, now: float) -> list[int]:
        out = []
        while self._heap and self._heap[0][0] <= now:
            out.append(heapq.heappop(self._heap)[1])
        self.num_unsent -= len(out)
        return out

    def ended(self, index: int, now: float) -> None:
        after = self._turns.after(index)
        if after is not None:
            request = self._requests[after]
            heapq.heappush(self._heap, (max(request.arrival / self._speed, now + request.think_s), after))

    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None


class ClosedLoop:
    """Keeps `concurrency` requests open, in the trace's order. A session's next turn goes first.

    Arrival times and think_s are ignored.
    """

    def __init__(self, trace: Trace, concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self._turns = Turns(trace)
        self._ready = deque(self._turns.first)
        self._num_free = concurrency
        self.num_unsent = len(trace.requests)

    def due(self, now: float) -> list[int]:
        out = [self._ready.popleft() for _ in range(min(self._num_free, len(self._ready)))]
        self._num_free -= len(out)
        self.num_unsent -= len(out)
        return out

    def ended(self, index: int, now: float) -> None:
        self._num_free += 1
        after = self._turns.after(index)
        if after is not None:
            self._ready.appendleft(after)

    def next_at(self) -> float | None:
        return 0.0 if self._num_free and self._ready else None
