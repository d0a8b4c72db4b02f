"""CPU time that somebody else's grammar or pattern may take of the loop's thread."""

from __future__ import annotations


class StepMeter:
    """A leaky bucket of CPU time: each step pays for its work, step_ms of that are free, and what is owed beyond may not pass
    burst_ms. Lets a rare slow step pass, and no lasting slowness. Once overrun it stays so, unless it
    is forgiven."""

    def __init__(self, step_ms: float, burst_ms: float) -> None:
        self._step_s = step_ms / 1e3
        self._burst_s = burst_ms / 1e3
        self._owed_s = 0.0
        self.overrun = False

    def spend(self, seconds: float) -> None:
        self._owed_s += seconds
        self.overrun = self.overrun or self._owed_s > self._burst_s

    def forgive(self) -> None:
        """What has been owed so far, and that it was too much."""
        self._owed_s, self.overrun = 0.0, False

    def step(self) -> None:
        self._owed_s = max(0.0, self._owed_s - self._step_s)
