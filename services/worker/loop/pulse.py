"""The loop's signs of life, by which the watchdog and the gateways judge its progress.

The loop's thread writes them, one plain attribute at a time; other threads read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pulse:
    """The time of the loop's last sign of life."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = clock()
        self._until = 0.0

    def beat(self) -> None:
        """Records the beginning or the end of a step or a turn."""
        self._since = self._clock()
        self._until = 0.0

    def works(self, until: float) -> None:
        """Records the beginning of an operator's command, which may take until `until`. Applies until the next beat."""
        self._since = self._clock()
        self._until = until

    def rest(self) -> None:
        """Records that the loop waits for messages for a bounded time, because it has no work or an operator slows it down."""
        self._since = None

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 while the loop rests."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @property
    def silent_s(self) -> float:
        """Seconds since the last beat without the time that the present command may take; 0 while the loop rests."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - max(since, self._until))
