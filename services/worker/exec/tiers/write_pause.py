"""Pauses the writes to a store, or all calls of the store, after a failure."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 1.0  # seconds of the pause after the first failure; each further failure doubles the pause
MOST_SECONDS = 300.0  # longest pause in seconds


class WritePause:
    """A pause that begins with a failure. Its length doubles with each failure, from FIRST_SECONDS to MOST_SECONDS.

    A success ends the pause and resets the length.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts without a pause.

        Args:
            clock: returns rising seconds.
        """
        self._clock = clock
        self._seconds = 0.0
        self._until = 0.0

    @property
    def over(self) -> bool:
        """Whether no pause is running."""
        return self._seconds == 0.0 or self._clock() >= self._until

    def failed(self) -> float:
        """Begins a pause and returns its length in seconds."""
        self._seconds = min(max(FIRST_SECONDS, 2 * self._seconds), MOST_SECONDS)
        self._until = self._clock() + self._seconds
        return self._seconds

    def worked(self) -> None:
        self._seconds = 0.0
