"""How long one choice has been without a worker, and what it has cost its key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Wait:
    """since: when it last began to wait, in the event loop's time. patience_s: seconds that it had left then, after which waiting
    ends with an error; None before it has waited. charged: prompt and output tokens, by weight, that are on its key's account."""

    __slots__ = ("charged", "patience_s", "since", "timer")

    def __init__(self) -> None:
        self.timer: asyncio.TimerHandle | None = None  # runs while it waits
        self.since = 0.0
        self.patience_s: float | None = None
        self.charged = 0

    def begin(self, patience_s: float, afresh: bool, expired: Callable[[], None]) -> None:
        """patience_s: for all its waits, but not for what it is computed between them. afresh: those before do not count."""
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        if self.patience_s is None or afresh:
            self.patience_s = patience_s
        self.timer = loop.call_at(self.since + max(0.0, self.patience_s), expired)

    def prolong(self, patience_s: float, expired: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.patience_s = loop.time() - self.since + patience_s
        self.timer = loop.call_at(self.since + self.patience_s, expired)

    def end(self) -> float | None:
        """Returns for how many seconds it has waited, None if it did not wait."""
        if self.timer is None:
            return None
        self.timer.cancel()
        self.timer = None
        waited_s = asyncio.get_running_loop().time() - self.since
        assert self.patience_s is not None, "it has begun to wait"
        self.patience_s -= waited_s
        return waited_s

    def due(self, spent: int) -> int:
        """What of all that has been spent on it is not charged yet; it is from here on."""
        due = max(0, spent - self.charged)
        self.charged += due
        return due
