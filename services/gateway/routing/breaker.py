"""Keeps requests away from a worker that fails them, and finds out when it has recovered."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """Times in seconds. Opens at `threshold` faults in a row, or where of at least `min_results` results within `window_s`
    the share `fault_ratio` were faults. cooldown_s doubles with every failed probe, up to max_cooldown_s. probe_s: without a
    result for so long, a probe is given up."""

    threshold: int = 5
    window_s: float = 30.0
    fault_ratio: float = 0.5
    min_results: int = 20
    cooldown_s: float = 5.0
    max_cooldown_s: float = 60.0
    probe_s: float = 30.0


class CircuitBreaker:
    """One worker's. The caller reports results; only faults of the server are faults: a refused bad request, a client that
    went away or a deadline that the client chose are neither success nor failure. `now`: seconds, never falling."""

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._state = BreakerState.CLOSED
        self._in_a_row = 0
        self._window = _Window(self._config.window_s)
        self._cooldown = self._config.cooldown_s
        self._until = 0.0  # OPEN: end of the cooldown; HALF_OPEN: end of the probe

    @property
    def state(self) -> BreakerState:
        return self._state

    def allows(self, now: float) -> bool:
        """Whether a request may be sent. Changes nothing."""
        return self._state is BreakerState.CLOSED or now >= self._until

    def begin(self, now: float) -> None:
        """A request is being sent. Unless closed, it is the probe: no other is allowed before its result or its deadline."""
        if self._state is not BreakerState.CLOSED and self.allows(now):
            self._state = BreakerState.HALF_OPEN
            self._until = now + self._config.probe_s

    def succeeded(self, now: float) -> None:
        """Closes a half-open breaker. While open, it is the late result of something older and says nothing."""
        if self._state is BreakerState.OPEN:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._close()
        self._in_a_row = 0
        self._window.add(now, False)

    def failed(self, now: float) -> None:
        if self._state is BreakerState.OPEN:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._cooldown = min(self._cooldown * 2, self._config.max_cooldown_s)
            self._open(now)
            return
        self._in_a_row += 1
        self._window.add(now, True)
        if self._in_a_row >= self._config.threshold or self._too_many():
            self._open(now)

    def _too_many(self) -> bool:
        results, faults = self._window.results, self._window.faults
        return results >= self._config.min_results and faults >= self._config.fault_ratio * results

    def _open(self, now: float) -> None:
        self._state = BreakerState.OPEN
        self._until = now + self._cooldown

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._cooldown = self._config.cooldown_s
        self._window = _Window(self._config.window_s)


class _Window:
    """Results and faults of the last `window_s`, counted in tenths of it."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / 10
        self._slices: deque[tuple[int, int, int]] = deque()  # number, results, faults
        self.results = 0
        self.faults = 0

    def add(self, now: float, fault: bool) -> None:
        number = int(now / self._slice_s)
        if self._slices and self._slices[-1][0] == number:
            _, results, faults = self._slices.pop()
        else:
            results = faults = 0
        self._slices.append((number, results + 1, faults + fault))
        self.results += 1
        self.faults += fault
        while self._slices[0][0] <= number - 10:
            _, results, faults = self._slices.popleft()
            self.results -= results
            self.faults -= faults
