"""The phase of this worker as a metric, which is available before the model is loaded.

The asyncio thread, the watchdog's thread and the thread that finds the device lost write WorkerLife, each its own attributes,
without a lock. Scrapes read it.
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
        self._hangs = False  # whether the scheduler loop hangs; the watchdog's thread writes it
        self._num_hangs = 0  # number of hangs since the start; the watchdog's thread writes it
        self._lost_device = False  # True after the device was lost: only a new process can use it again

    def ready(self) -> None:
        self.phase = WorkerPhase.READY
        self.cold_start_s = self._clock() - self._begun

    def draining(self) -> None:
        self.phase = WorkerPhase.DRAINING

    def hung(self) -> None:
        self._hangs = True
        self._num_hangs += 1

    def recovered(self) -> None:
        """Records that the loop has shown a sign of life after a hang."""
        self._hangs = False

    def lost_device(self) -> None:
        self._lost_device = True

    @property
    def is_hung(self) -> bool:
        """Whether the scheduler loop hangs, or the device is lost."""
        return self._hangs or self._lost_device

    @property
    def hangs(self) -> int:
        """Number of hangs and losses of the device since the start."""
        return self._num_hangs + self._lost_device


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
