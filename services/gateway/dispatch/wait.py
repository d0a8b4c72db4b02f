"""How long one choice has been without a worker, and what it has cost its key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Wait:
    """since: when it last began to wait. patience_until: when waiting ends with an error, 0.0 before it has waited. charged:
    prompt and output tokens, by weight, that are on its key's account. Times are the event loop's."""

    __slots__ = ("charged", "patience_until", "since", "timer")

    def __init__(self) -> None:
        self.timer: asyncio.TimerHandle | None = None  # runs while it waits
        self.since = 0.0
        self.patience_until = 0.0
        self.charged = 0

    def begin(self, patience_s: float, expired: Callable[[], None]) -> None:
        """Its patience counts from its first wait on."""
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        if self.patience_until == 0.0:
            self.patience_until = self.since + patience_s
        self.timer = loop.call_at(max(self.since, self.patience_until), expired)

    def prolong(self, patience_s: float, expired: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.patience_until = loop.time() + patience_s
        self.timer = loop.call_at(self.patience_until, expired)

    def end(self) -> float | None:
        """Returns for how many seconds it has waited, None if it did not wait."""
        if self.timer is None:
            return None
        self.timer.cancel()
        self.timer = None
        return asyncio.get_running_loop().time() - self.since

    def due(self, spent: int) -> int:
        """What of all that has been spent on it is not charged yet; it is from here on."""
        due = max(0, spent - self.charged)
        self.charged += due
        return due
