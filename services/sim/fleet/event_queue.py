"""Defines the clock of a fleet: a queue of actions by virtual time, in seconds since the simulation began."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventQueue:
    """Runs actions in the order of their times. Actions of equal times run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Adds an action. If `time` has passed, the action runs at the current time."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, action, *args)

    def step(self) -> None:
        """Advances the clock to the next action and runs it. Raises IndexError if the queue is empty."""
        self.now, _, action, args = heapq.heappop(self._heap)
        action(*args)
