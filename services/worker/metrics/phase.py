"""Where this worker is in its life, for metrics: from the moment that the process answers, long before the model is loaded.

Written by the asyncio thread and the watchdog's, one plain attribute at a time; read by scrapes.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LABELS = ("model_name",)


class Phase(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class WorkerLife(Collector):
    """model: the name that clients use. The cold start counts from this object's making to ready()."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._begun = clock()
        self._cold_start_s: float | None = None
        self._phase = Phase.LOADING
        self._hung = False
        self._hangs = 0

    def ready(self) -> None:
        self._phase = Phase.READY
        self._cold_start_s = self._clock() - self._begun

    def draining(self) -> None:
        self._phase = Phase.DRAINING

    def hung(self) -> None:
        self._hung = True
        self._hangs += 1

    def recovered(self) -> None:
        self._hung = False

    def collect(self) -> Iterator[Metric]:
        phases = GaugeMetricFamily("rootstock_worker_phase", "1 for the phase that the worker is in.", labels=(*LABELS, "phase"))
        for phase in Phase:
            phases.add_metric((self._model, phase), float(phase is self._phase))
        yield phases
        hung = GaugeMetricFamily("rootstock_worker_hung", "1 while the loop does not turn though it should.", labels=LABELS)
        hung.add_metric((self._model,), float(self._hung))
        yield hung
        hangs = CounterMetricFamily("rootstock_worker_hangs", "Times that the loop stopped turning.", labels=LABELS)
        hangs.add_metric((self._model,), float(self._hangs))
        yield hangs
        if self._cold_start_s is not None:
            text = "From the process's first answer to ready, in seconds."
            start = GaugeMetricFamily("rootstock_worker_cold_start_seconds", text, labels=LABELS)
            start.add_metric((self._model,), self._cold_start_s)
            yield start
