"""How fast what waits is being served: what a 503 tells its client to wait for."""

from __future__ import annotations

from collections.abc import Callable

WINDOW_S = 15.0  # completions are counted over one to two of these
LONGEST_S = 60


class Pace:
    """waiting: choices that wait for a worker. least_s: what is said where nothing waits. clock: seconds."""

    def __init__(self, waiting: Callable[[], int], least_s: int, clock: Callable[[], float]) -> None:
        self._waiting = waiting
        self._least_s = least_s
        self._clock = clock
        self._begun = clock()
        self._before = 0  # completed in the window before this one
        self._since = 0

    def completed(self) -> None:
        """A choice has left its worker, and made room for another."""
        self._turn()
        self._since += 1

    def retry_after_s(self) -> int:
        """Seconds until who waits now is served at the pace of late, from least_s to LONGEST_S. While nothing at all comes to its
        end that is not known, and as long as it has been counted for is the best guess."""
        self._turn()
        waiting = self._waiting()
        if not waiting:
            return self._least_s
        counted_s = self._clock() - self._begun + WINDOW_S
        done = self._before + self._since
        seconds = counted_s * waiting / done if done else counted_s
        return int(min(max(-(-seconds // 1), self._least_s), LONGEST_S))

    def _turn(self) -> None:
        passed = self._clock() - self._begun
        if passed >= WINDOW_S:
            self._before = self._since if passed < 2 * WINDOW_S else 0
            self._since = 0
            self._begun += passed // WINDOW_S * WINDOW_S
