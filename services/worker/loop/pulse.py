"""Whether the loop gets on: the one figure by which the watchdog and the front ends judge it.

Written on the loop's thread, one plain attribute at a time; read by any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pulse:
    """clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = clock()
        self._until = 0.0

    def beat(self) -> None:
        """The loop has begun or ended a step, or a turn."""
        self._since = self._clock()
        self._until = 0.0

    def works(self, until: float) -> None:
        """The loop has begun what may take until then: an operator has given it so long. Until the next beat."""
        self._since = self._clock()
        self._until = until

    def rest(self) -> None:
        """The loop waits for messages, for a bounded time: for want of work, or because an operator slows it down."""
        self._since = None

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 while the loop rests."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @property
    def silent_s(self) -> float:
        """The same, but for what it has been given the time for."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - max(since, self._until))
