"""The fleet's one virtual clock: what happens next, in seconds since the simulation began."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Actions in the order of their times, and among equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """At once where `time` has passed."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, action, *args)

    def step(self) -> None:
        """Moves to the next action and does it. Raises IndexError if there is none."""
        self.now, _, action, args = heapq.heappop(self._heap)
        action(*args)
