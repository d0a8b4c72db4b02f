"""Requests that somebody waits for, as against those in the background: how many there are, and since when there are none."""

from __future__ import annotations

from collections.abc import Callable


class Attendance:
    """clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._last = float("-inf")
        self._arrived: list[Callable[[bool], None]] = []

    def listen(self, arrived: Callable[[bool], None]) -> None:
        """It is called when somebody begins to wait, and told whether nobody else does."""
        self._arrived.append(arrived)

    def begin(self, attended: bool) -> None:
        self._open += attended
        if attended:
            self._last = self._clock()
            for arrived in self._arrived:
                arrived(self._open == 1)

    def end(self, attended: bool) -> None:
        """Of one that has begun."""
        self._open -= attended
        if attended:
            self._last = self._clock()

    @property
    def quiet_s(self) -> float:
        """Seconds for which nobody has waited; 0.0 while somebody does."""
        return 0.0 if self._open else self._clock() - self._last
