"""The phase of this worker as a metric, which is available before the model is loaded.

The asyncio thread, the watchdog's thread and the thread that finds the device lost write WorkerLife, one plain attribute at a
time, without a lock. Scrapes read it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from rootstock_llm.services.shared.observe.readings import Reading, Readings


class WorkerPhase(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class WorkerLife:
    """The phase of one worker, and how often its scheduler loop has hung or its device was lost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self.cold_start_s: float | None = None  # seconds from the creation of this object to ready(); None before ready()
        self.phase = WorkerPhase.LOADING
        self.is_hung = False  # whether a step hangs, or the device is lost
        self._has_device = True
        self.hangs = 0  # number of hangs and losses of the device since the start

    def ready(self) -> None:
        self.phase = WorkerPhase.READY
        self.cold_start_s = self._clock() - self._begun

    def draining(self) -> None:
        self.phase = WorkerPhase.DRAINING

    def hung(self) -> None:
        self.is_hung = True
        self.hangs += 1

    def recovered(self) -> bool:
        """Ends a hang. Returns False, and changes nothing, if the device is lost: only a new process can use it again."""
        self.is_hung = not self._has_device
        return self._has_device

    def lost_device(self) -> None:
        self._has_device = False
        self.hung()


def _phases(life: WorkerLife) -> dict[tuple[str, ...], float]:
    return {(phase,): phase is life.phase for phase in WorkerPhase}


class LifeMetrics(Readings[WorkerLife]):
    """Metrics of one worker's phase. The label is the served model name."""

    labels = ("model_name",)
    rows = (
        Reading(
            Gauge, "rootstock_worker_phase", "1 for the present phase of the worker, 0 for the other phases.", _phases, ("phase",)
        ),
        Reading(
            Gauge,
            "rootstock_worker_hung",
            "1 while the scheduler loop is hung, or if the device is lost.",
            lambda life: life.is_hung,
        ),
        Reading(
            Counter, "rootstock_worker_hangs", "Hangs of the scheduler loop, and losses of the device.", lambda life: life.hangs
        ),
        Reading(
            Gauge,
            "rootstock_worker_cold_start_seconds",
            "Seconds from the start of the /metrics server, before the model is loaded, to ready.",
            lambda life: life.cold_start_s,
        ),
    )
