"""Pauses the writes to a store after a failure."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 1.0  # pause after the first failure; doubles with every failure in a row
MOST_SECONDS = 300.0


class WritePause:
    """A pause that doubles with each failure, from one second up to five minutes. A success resets it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts without a pause.

        Args:
            clock: rising seconds.
        """
        self._clock = clock
        self._seconds = 0.0
        self._until = 0.0

    @property
    def over(self) -> bool:
        return self._seconds == 0.0 or self._clock() >= self._until

    def failed(self) -> float:
        """Begins a pause and returns its length in seconds."""
        self._seconds = min(max(FIRST_SECONDS, 2 * self._seconds), MOST_SECONDS)
        self._until = self._clock() + self._seconds
        return self._seconds

    def worked(self) -> None:
        self._seconds = 0.0
