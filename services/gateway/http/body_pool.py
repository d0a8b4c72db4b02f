"""Bytes that bodies may hold at once, given out in order. Pure but for the futures that wait: one event loop's alone.

A body that has begun and needs more goes before those that have nothing yet: only who ends gives back.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Stuck(Exception):
    """Whoever could give bytes back waits for more: waiting would not end."""


class Place:
    """In the line for `size` more bytes. room: done once they are there. holds: bytes that it has already."""

    __slots__ = ("holds", "room", "size")

    def __init__(self, size: int, holds: int) -> None:
        self.size = size
        self.holds = holds
        self.room: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class BodyPool:
    """capacity: bytes. held: of them. Who takes gives back the same number, once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._begun: deque[Place] = deque()  # those that hold something
        self._new: deque[Place] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._begun) + len(self._new)

    def take(self, size: int, holds: int = 0) -> bool:
        """Whether there is room at once, with nobody before."""
        before = len(self._begun) if holds else self.num_waiting
        if before or self.held + size > self.capacity:
            return False
        self.held += size
        return True

    def join(self, size: int, holds: int = 0) -> Place:
        """The end of the line. holds: what it has of this pool, and keeps while it waits. Raises Stuck."""
        if holds and self.held == holds + sum(place.holds for place in self._begun):
            raise Stuck
        place = Place(size, holds)
        (self._begun if holds else self._new).append(place)
        return place

    def leave(self, place: Place) -> None:
        """It will not take what it waits for, or has been given."""
        if place.room.done():
            self.give(place.size)
            return
        place.room.cancel()
        (self._begun if place.holds else self._new).remove(place)
        self._admit()  # those behind it may fit

    def give(self, size: int) -> None:
        self.held -= size
        self._admit()

    def _admit(self) -> None:
        for line in (self._begun, self._new):
            while line and self.held + line[0].size <= self.capacity:
                place = line.popleft()
                self.held += place.size
                place.room.set_result(None)
            if line:
                return
