"""Tells how far the reading of weights has come: percent, GB and GB/s, every few seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable

REPORT_EVERY_S = 3.0


class LoadMeter:
    """total: bytes. clock: seconds. say: called with a line, by one thread at a time. All calls are safe from any thread."""

    def __init__(self, total: int, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._total, self._clock, self._say = total, clock, say
        self._lock = threading.Lock()
        self._begun = self._reported = clock()
        self._done = 0

    def added(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            assert self._done <= self._total, "no byte is read twice"
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
        passed = self._reported - self._begun
        rate = f", {self._done / 1e9 / passed:.2f} GB/s" if passed > 0 else ""
        percent = 100 * self._done // self._total if self._total else 100
        self._say(f"weights: {percent} %, {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB in {passed:.1f} s{rate}")
