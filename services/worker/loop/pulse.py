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

    def beat(self) -> None:
        """The loop has begun or ended a step, or a turn."""
        self._since = self._clock()

    def rest(self) -> None:
        """The loop waits for messages, for a bounded time: for want of work, or because an operator slows it down."""
        self._since = None

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 while the loop rests."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)
