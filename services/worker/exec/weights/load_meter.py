"""Reports the progress of reading weights: share, amount, rate and estimated time left."""

from __future__ import annotations

import threading
from collections.abc import Callable

from services.shared.observe.progress import GB, Progress

REPORT_EVERY_S = 3.0


class LoadMeter:
    """Counts the bytes that were read. Any thread may call any method."""

    def __init__(self, total: int, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        """
        Args:
            total: bytes.
            clock: returns seconds.
            say: receives a line, from one thread at a time.
        """
        self._total, self._clock, self._say = total, clock, say
        self._lock = threading.Lock()
        self._begun = self._reported = clock()
        self._done = 0

    def added(self, count: int) -> None:
        with self._lock:
            self._done += count
            assert self._done <= self._total, "nothing is read twice"
        self.tick()

    def tick(self) -> None:
        """Reports if a report is due. Callers call it also while nothing is read, so that the log shows a stalled disk."""
        with self._lock:
            if self._clock() - self._reported >= REPORT_EVERY_S:
                self._report()

    def end(self) -> None:
        with self._lock:
            self._report()

    def _report(self) -> None:
        self._reported = self._clock()
        self._say(Progress("weights", self._done, self._total, self._reported - self._begun, GB).line())
