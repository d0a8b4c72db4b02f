"""How long each part of making an executor took, measured by the one thread that makes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("config", "weights", "draft", "kv_pool", "profile", "graphs", "warm_up")
TOTAL = "total"


class LoadPhases:
    """The total counts from this object's making. clock: seconds. weight_bytes_read: from files, as they lie there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.weight_bytes_read = 0
        self._begun = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the block's time to the phase's, also where the block raises. Raises ValueError for a name not in PHASES."""
        if phase not in PHASES:
            raise ValueError(f"{phase} is no phase of loading; there are {', '.join(PHASES)}")
        begun = self.clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self.clock() - begun

    def seconds(self) -> tuple[tuple[str, float], ...]:
        """The phases that there were, in the order of PHASES, and the total so far."""
        assert min(self._seconds.values(), default=0.0) >= 0, "a clock that goes back"
        passed = [(phase, self._seconds[phase]) for phase in PHASES if phase in self._seconds]
        return (*passed, (TOTAL, self.clock() - self._begun))

    def describe(self) -> str:
        """For the log: "config 0.4 s, weights 3.1 s (16.4 GB read), ..., total 9.0 s"."""
        read = f" ({self.weight_bytes_read / 1e9:.1f} GB read)" if self.weight_bytes_read else ""
        return ", ".join(f"{phase} {seconds:.1f} s{read if phase == 'weights' else ''}" for phase, seconds in self.seconds())
