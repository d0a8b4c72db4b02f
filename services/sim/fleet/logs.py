"""Records the placements, load and handovers of a fleet's simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.gateway.routing.policies import Pick
from rootstock_llm.services.sim.core.run.logs import RequestLog
from rootstock_llm.services.worker.core.contracts.messages import Finish

F64 = NDArray[np.float64]


class PlacementLog:
    """Placements of requests, in columns by index in the trace."""

    def __init__(self, count: int) -> None:
        self.worker = np.full(count, -1, np.int64)  # row of the last worker that got the request; -1: no worker
        self.predicted = np.zeros(count, np.int64)  # prompt tokens that the gateway expected the first worker to have cached
        self.sends = np.zeros(count, np.int64)  # number of times that the request was sent
        self.reasons: Counter[str] = Counter()  # routing reasons of all placements

    def placed(self, index: int, pick: Pick, again: bool) -> None:
        self.worker[index] = pick.row
        self.sends[index] += 1
        self.reasons[pick.reason] += 1
        if not again:
            self.predicted[index] = pick.predicted_tokens


class LoadLog:
    """Open requests of every worker, sampled at equal intervals."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._open: list[NDArray[np.int32]] = []

    def add(self, now: float, opened: Sequence[int]) -> None:
        self._times.append(now)
        self._open.append(np.array(opened, np.int32))

    def open_between(self, begin: float, end: float) -> F64:
        """Returns float64[samples, workers]: open requests in the samples after `begin` and up to `end`.

        If there are no such samples, returns all samples after `begin`.
        """
        first, last = (int(at) for at in np.searchsorted(self._times, [begin, end], side="right"))
        return np.array(self._open[first : last if last > first else None], np.float64)


class HandoverLog:
    """Handovers of requests from a prefill worker to a decode worker."""

    def __init__(self, count: int) -> None:
        self.count = np.zeros(count, np.int64)  # handovers by index in the trace
        self.pages = 0  # pages that prefill workers reserved for decode workers
        self._first: dict[int, Finish] = {}
        self._since: dict[int, float] = {}
        self._gaps: list[float] = []

    def handed_over(self, finish: Finish, now: float) -> None:
        self.count[finish.handle] += 1
        self.pages += finish.reserved_pages
        self._first.setdefault(finish.handle, finish)
        self._since[finish.handle] = now

    def add_outputs(self, handles: Sequence[int], now: float) -> None:
        """Records `now` as the time of the first token after the handover, for each request in `handles` that was handed over."""
        if self._since:
            self._gaps += [now - self._since.pop(handle) for handle in handles if handle in self._since]

    def whole(self, finish: Finish) -> Finish:
        """Returns `finish` as a client gets it: with the cached tokens and the queue time of the first worker."""
        first = self._first.pop(finish.handle, None)
        return finish if first is None else replace(finish, cached_tokens=first.cached_tokens, queue_s=first.queue_s)

    def gaps(self) -> F64:
        """Returns float64[n], seconds between the token at which a request was handed over and the request's next token."""
        return np.array(self._gaps, np.float64)


class FleetLog:
    def __init__(self, count: int) -> None:
        self.requests = RequestLog(count)
        self.placements = PlacementLog(count)
        self.loads = LoadLog()
        self.handovers = HandoverLog(count)
