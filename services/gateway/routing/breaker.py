"""The circuit breaker of a worker. It stops requests to a failing worker, and probes whether the worker has recovered."""

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
    """The settings of a circuit breaker. Times are in seconds."""

    threshold: int = 5  # faults in a row that open the breaker
    window_s: float = 30.0  # time for which a result counts in fault_ratio
    fault_ratio: float = 0.5  # smallest share of faults in the window that opens the breaker
    min_results: int = 20  # smallest number of results in the window for which fault_ratio applies
    cooldown_s: float = 5.0  # time for which the breaker stays open before a probe; doubles with every failed probe
    max_cooldown_s: float = 60.0  # limit of the doubled cooldown
    probe_s: float = 30.0  # time limit of a probe; after it, the next request may be another probe


class CircuitBreaker:
    """The circuit breaker of one worker.

    The caller reports the results of requests. Only faults of the worker are failures. A refused invalid request, a disconnected
    client or an expired deadline is neither a success nor a failure. `now` is in seconds and never decreases.
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._state = BreakerState.CLOSED
        self._in_a_row = 0  # faults since the last success
        self._window = _Window(self._config.window_s)
        self._cooldown = self._config.cooldown_s  # length of the current or next cooldown in seconds
        self._until = 0.0  # OPEN: end of the cooldown; HALF_OPEN: end of the probe

    @property
    def state(self) -> BreakerState:
        return self._state

    def allows(self, now: float) -> bool:
        """Returns whether a request may be sent. Changes nothing."""
        return self._state is BreakerState.CLOSED or now >= self._until

    def begin(self, now: float) -> None:
        """Notes that a request is being sent.

        If the breaker is not closed, the request is a probe. The next request is allowed after the probe has succeeded, after
        another cooldown if the probe has failed, or after probe_s without a result.
        """
        if self._state is not BreakerState.CLOSED and self.allows(now):
            self._state = BreakerState.HALF_OPEN
            self._until = now + self._config.probe_s

    def succeeded(self, now: float) -> None:
        """Notes a success, which closes a half-open breaker.

        Has no effect on an open breaker, because the request was usually sent before the breaker opened.
        """
        if self._state is BreakerState.OPEN:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._close()
        self._in_a_row = 0
        self._window.add(now, False)

    def failed(self, now: float) -> None:
        """Notes a fault. Has no effect on an open breaker: the request was usually sent before it opened."""
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
    """Counts the results, and the faults among them, of the last window_s seconds. The window moves in ten slices."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / 10
        self._slices: deque[tuple[int, int, int]] = deque()  # number of the slice, its results, its faults
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
