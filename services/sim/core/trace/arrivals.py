"""When the requests of a trace are sent. Both kinds send the turns of a session one after another."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

from services.sim.core.trace.trace import Trace


class Arrivals(Protocol):
    """Requests are named by their place in the trace; each is given out once."""

    def due(self, now: float) -> list[int]:
        """Those to be sent by `now`, in order; they count as sent."""
        ...

    def ended(self, index: int, now: float) -> None:
        """A request that was sent has had its terminal output."""
        ...

    def next_at(self) -> float | None:
        """When the next one is due if nothing ends before. None: none is."""
        ...

    @property
    def num_unsent(self) -> int: ...


class Turns:
    """The order within sessions."""

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
    """Every request at its arrival, however busy the worker is. speed: arrivals come so many times as fast."""

    def __init__(self, trace: Trace, speed: float = 1.0) -> None:
        if not speed > 0:
            raise ValueError("speed is above 0")
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
    """So many requests at a time, in the trace's order, a session's next turn first; times in the trace do not count."""

    def __init__(self, trace: Trace, concurrency: int) -> None:
        if concurrency < 1:
            raise ValueError("concurrency is at least 1")
        self._turns = Turns(trace)
        self._ready = deque(self._turns.first)
        self._room = concurrency
        self.num_unsent = len(trace.requests)

    def due(self, now: float) -> list[int]:
        out = [self._ready.popleft() for _ in range(min(self._room, len(self._ready)))]
        self._room -= len(out)
        self.num_unsent -= len(out)
        return out

    def ended(self, index: int, now: float) -> None:
        self._room += 1
        after = self._turns.after(index)
        if after is not None:
            self._ready.appendleft(after)

    def next_at(self) -> float | None:
        return 0.0 if self._room and self._ready else None
