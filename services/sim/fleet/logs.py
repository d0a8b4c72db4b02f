"""What a fleet's simulation writes down, besides what one worker's does: where requests went and why, and the load over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import Pick
from services.sim.core.run.logs import RequestLog
from services.worker.core.contracts.messages import Finish

F64 = NDArray[np.float64]


class PlacementLog:
    """Columns by place in the trace. worker: the last it was sent to, -1 for none. predicted: prompt tokens that the gateway
    took for cached there when it sent the request first. sends: how often it was sent. reasons: of every placing."""

    def __init__(self, count: int) -> None:
        self.worker = np.full(count, -1, np.int64)
        self.predicted = np.zeros(count, np.int64)
        self.sends = np.zeros(count, np.int64)
        self.reasons: Counter[str] = Counter()

    def placed(self, index: int, pick: Pick, again: bool) -> None:
        self.worker[index] = pick.row
        self.sends[index] += 1
        self.reasons[pick.reason] += 1
        if not again:
            self.predicted[index] = pick.predicted_tokens


class LoadLog:
    """Open requests of every worker, at equal times."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._open: list[NDArray[np.int32]] = []

    def add(self, now: float, opened: Sequence[int]) -> None:
        self._times.append(now)
        self._open.append(np.array(opened, np.int32))

    def open_between(self, begin: float, end: float) -> F64:
        """float64[samples, workers]: those after `begin` and up to `end`; where there is none, all those after `begin`."""
        first, last = (int(at) for at in np.searchsorted(self._times, [begin, end], side="right"))
        return np.array(self._open[first : last if last > first else None], np.float64)


class HandoverLog:
    """Of requests whose prompt one worker computes and with which another goes on. count: by place in the trace. pages: that were
    kept for readers."""

    def __init__(self, count: int) -> None:
        self.count = np.zeros(count, np.int64)
        self.pages = 0
        self._first: dict[int, Finish] = {}
        self._since: dict[int, float] = {}
        self._gaps: list[float] = []

    def handed_over(self, finish: Finish, now: float) -> None:
        self.count[finish.handle] += 1
        self.pages += finish.room_pages
        self._first.setdefault(finish.handle, finish)
        self._since[finish.handle] = now

    def told(self, handles: Sequence[int], now: float) -> None:
        """These have said more."""
        if self._since:
            self._gaps += [now - self._since.pop(handle) for handle in handles if handle in self._since]

    def whole(self, finish: Finish) -> Finish:
        """An answer's end, as its client is told of it: what its prompt has cost is what the first worker says."""
        first = self._first.pop(finish.handle, None)
        return finish if first is None else replace(finish, cached_tokens=first.cached_tokens, queue_s=first.queue_s)

    def gaps(self) -> F64:
        """float64[n]: seconds from the token with which a request was handed over to its next."""
        return np.array(self._gaps, np.float64)


class FleetLog:
    def __init__(self, count: int) -> None:
        self.requests = RequestLog(count)
        self.placements = PlacementLog(count)
        self.loads = LoadLog()
        self.handovers = HandoverLog(count)
