"""Computes the chart's recording rules of the group rootstock.autoscaling in Python. A test compares them with Prometheus."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.chart.worker_fleet import SLOTS, WorkerFleet

SCRAPE_S = 15
WINDOW_S = 120


@dataclass(frozen=True)
class Scrape:
    at: int  # seconds
    waiting: int  # queued requests at the gateway and the workers
    running: int  # running requests of all workers
    serving: int  # workers that serve
    loading: int  # workers that do not serve yet
    ended: dict[int, int]  # by worker: number of requests that have ended


class Recorded:
    """The recorded series of a fleet, computed from its scrapes of the last WINDOW_S. Call add() every SCRAPE_S."""

    def __init__(self) -> None:
        self._scrapes: deque[Scrape] = deque()

    def add(self, fleet: WorkerFleet) -> Scrape:
        serving = [worker for worker in fleet.workers if worker.serves(fleet.now)]
        scrape = Scrape(
            fleet.now,
            fleet.queue + sum(worker.waiting for worker in serving),
            sum(worker.running for worker in serving),
            len(serving),
            sum(not worker.serves(fleet.now) for worker in fleet.workers),
            {worker.number: worker.ended for worker in serving},
        )
        self._scrapes.append(scrape)
        while self._scrapes[0].at < scrape.at - WINDOW_S:
            self._scrapes.popleft()
        return scrape

    @property
    def ended_per_s(self) -> float:
        return sum(self._rate([(scrape.at, scrape.ended[number]) for scrape in self._scrapes if number in scrape.ended])
                   for number in {number for scrape in self._scrapes for number in scrape.ended})  # fmt: skip

    def _rate(self, samples: list[tuple[int, int]]) -> float:
        """Returns Prometheus's rate() of a counter's (time, value) samples.

        The increase is extrapolated from the first and the last sample to the ends of the window. If the gap at an end is 1.1
        sample intervals or longer, half an interval replaces the gap. At the beginning, the gap is at most the time in which the
        counter has risen from 0.
        """
        if len(samples) < 2:
            return 0.0
        (first, low), (last, high) = samples[0], samples[-1]
        end = self._scrapes[-1].at
        spacing = (last - first) / (len(samples) - 1)
        before, after = first - (end - WINDOW_S), end - last
        if high > low and low >= 0:
            before = min(before, (last - first) * low / (high - low))
        before = before if before < spacing * 1.1 else spacing / 2
        after = after if after < spacing * 1.1 else spacing / 2
        return (high - low) * (last - first + before + after) / (last - first) / WINDOW_S

    @property
    def arriving_per_s(self) -> float:
        at = [scrape.at for scrape in self._scrapes]
        open_requests = [scrape.waiting + scrape.running for scrape in self._scrapes]
        count, mean_at, mean_open = len(at), sum(at) / len(at), sum(open_requests) / len(at)
        spread = sum((each - mean_at) ** 2 for each in at)
        slope = (
            sum((a - mean_at) * (b - mean_open) for a, b in zip(at, open_requests, strict=True)) / spread if count > 1 else 0.0
        )
        return max(self.ended_per_s + slope, 0.0)

    @property
    def mean_workers(self) -> float:
        return sum(scrape.serving for scrape in self._scrapes) / len(self._scrapes)

    @property
    def enough_workers(self) -> float:
        last, ended = self._scrapes[-1], self.ended_per_s
        if ended > 0:
            return self.mean_workers * (self.arriving_per_s + last.waiting / 300) / ended
        return max(last.loading + 2 * self.mean_workers, 1)

    @property
    def arrival_share(self) -> float:
        last, ended = self._scrapes[-1], self.ended_per_s
        if not ended or not last.running:
            return 1.0
        return min(self.mean_workers * SLOTS * self.arriving_per_s / (ended * last.running), 1.0)
