"""Measures loading: the duration of each phase of a start, and the progress of reading weights, for log lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rootstock_llm.services.shared.observe.progress import GB, Progress

PHASES = ("config", "weights", "draft", "kv_pool", "profile", "graphs", "warm_up")
TOTAL = "total"
REPORT_EVERY_S = 3.0  # seconds between two log lines about the progress


class LoadPhases:
    """The duration of each phase so far. The total begins with the construction of this object."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock  # returns seconds
        self.weight_bytes_read = 0  # bytes that stream_weights() read from files; 0 on a CPU
        self._begun = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the duration of the block to the phase, even if the block raises. Raises ValueError for an unknown phase."""
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase} of a start; the phases are {', '.join(PHASES)}")
        begun = self.clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self.clock() - begun

    def seconds(self) -> tuple[tuple[str, float], ...]:
        """Returns (phase, seconds) of the phases that have run, in the order of PHASES, and then the total so far."""
        assert min(self._seconds.values(), default=0.0) >= 0, "no phase takes negative time"
        passed = [(phase, self._seconds[phase]) for phase in PHASES if phase in self._seconds]
        return (*passed, (TOTAL, self.clock() - self._begun))

    def describe(self) -> str:
        """Returns a log line: "config 0.4 s, weights 3.1 s (16.4 GB read), ..., total 9.0 s"."""
        read = f" ({self.weight_bytes_read / 1e9:.1f} GB read)" if self.weight_bytes_read else ""
        return ", ".join(f"{phase} {seconds:.1f} s{read if phase == 'weights' else ''}" for phase, seconds in self.seconds())


class LoadMeter:
    """Counts the bytes that were read, and logs the progress. Any thread may call any method."""

    def __init__(self, total: int, clock: Callable[[], float], log: Callable[[str], None]) -> None:
        """
        Args:
            total: bytes to read.
            clock: returns seconds.
            log: called with a log line, by one thread at a time.
        """
        self._total, self._clock, self._log = total, clock, log
        self._lock = threading.Lock()
        self._begun = self._reported = clock()
        self._done = 0

    def added(self, count: int) -> None:
        with self._lock:
            self._done += count
            assert self._done <= self._total, "no byte is counted twice"
        self.tick()

    def tick(self) -> None:
        """Writes a log line if one is due. Also called while no bytes arrive, so that the log shows a stalled disk."""
        with self._lock:
            if self._clock() - self._reported >= REPORT_EVERY_S:
                self._report()

    def end(self) -> None:
        with self._lock:
            self._report()

    def _report(self) -> None:
        self._reported = self._clock()
        self._log(Progress("weights", self._done, self._total, self._reported - self._begun, GB).line())
