"""Virtual time, in seconds since the simulation began. Moved by the simulation and its executor alone."""

from __future__ import annotations


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def pass_until(self, at: float) -> None:
        """No effect where `at` has passed."""
        self.now = max(self.now, at)
