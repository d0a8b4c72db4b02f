"""Tells how far the reading of weights has come, every few seconds: shares, amounts, the rate, and how long it may still take."""

from __future__ import annotations

import threading
from collections.abc import Callable

from services.shared.observe.progress import GB, Progress

REPORT_EVERY_S = 3.0


class LoadMeter:
    """total: bytes, or what `unit` counts. clock: seconds. say: called with a line, by one thread at a time. All calls are safe
    from any thread."""

    def __init__(self, total: int, clock: Callable[[], float], say: Callable[[str], None], unit: str = GB) -> None:
        self._total, self._clock, self._say, self._unit = total, clock, say, unit
        self._lock = threading.Lock()
        self._begun = self._reported = clock()
        self._done = 0

    def added(self, count: int) -> None:
        with self._lock:
            self._done += count
            assert self._done <= self._total, "nothing is read twice"
        self.tick()

    def tick(self) -> None:
        """Says a line if one is due: also where nothing was read, so that a stalled disk is seen."""
        with self._lock:
            if self._clock() - self._reported >= REPORT_EVERY_S:
                self._report()

    def end(self) -> None:
        with self._lock:
            self._report()

    def _report(self) -> None:
        self._reported = self._clock()
        self._say(Progress("weights", self._done, self._total, self._reported - self._begun, self._unit).line())
