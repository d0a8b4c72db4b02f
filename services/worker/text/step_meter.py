"""Limits the CPU time that a client's grammar or stop pattern may take on the scheduler loop's thread."""

from __future__ import annotations


class StepMeter:
    """A leaky bucket of CPU time. It tolerates single slow steps and detects lasting slowness.

    spend() adds to the level, and each step() removes step_ms. If the level exceeds burst_ms, `overrun` becomes True and stays
    True until reset().
    """

    def __init__(self, step_ms: float, burst_ms: float) -> None:
        self._step_s = step_ms / 1e3
        self._burst_s = burst_ms / 1e3
        self._level_s = 0.0
        self.overrun = False

    def spend(self, seconds: float) -> None:
        self._level_s += seconds
        self.overrun = self.overrun or self._level_s > self._burst_s

    def reset(self) -> None:
        """Empties the bucket and resets `overrun`."""
        self._level_s, self.overrun = 0.0, False

    def step(self) -> None:
        self._level_s = max(0.0, self._level_s - self._step_s)
