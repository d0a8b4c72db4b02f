"""Limits the batch lines that a gateway computes at once, so that batches use only capacity that other requests leave.

| situation | lanes |
| --- | --- |
| no other request is open | `most` |
| other requests are open | `beside` |
| a choice waits for a worker | no line starts |

If another request arrives, lines that have just started are cancelled and retried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_S = 0.05  # seconds between two checks for a lane while a line waits
YOUNG_S = 2.0  # age in seconds up to which a line may be cancelled; it is then computed again
HELD_S = 0.5  # seconds for which a line with a free lane waits until no other request is open; then it starts
MOST_GIVEN_UP = 3  # largest number of cancellations of one line
QUIET_S = 5.0  # seconds without other requests before more lanes open; gaps in interactive use are shorter
RISE_S = 0.5  # seconds between two lanes that open, so that requests after a short gap meet few lines


class Lanes:
    """The lanes of one gateway, shared by its batches. Belongs to one event loop."""

    def __init__(
        self,
        most: int,
        beside: int,
        waiting: Callable[[], int],
        quiet_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates free lanes.

        Args:
            most: Largest number of lines at once.
            beside: Largest number while other requests are open, and for QUIET_S afterwards.
            waiting: Returns the number of choices that wait in this gateway or in a worker's queue.
            quiet_s: Returns the seconds since the last other request ended; 0.0 while one is open.
            clock: Returns seconds.
        """
        self._most, self._beside = most, beside
        self._waiting = waiting
        self._quiet_s = quiet_s
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()
        self._clock = clock
        self._lines: dict[asyncio.Task[Any], float] = {}  # start of each line; -inf if it may not be cancelled again
        self._displaced: set[asyncio.Task[Any]] = set()  # lines that make_way() has cancelled
        self._closed = False
        self.used = 0  # lanes with a line

    async def answer(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Waits for a lane in arrival order, calls `ask` in it and returns the result. Retries if make_way() cancels the call."""
        given_up = 0
        while True:
            await self._enter()
            task = asyncio.create_task(ask())
            self._lines[task] = self._clock() if given_up < MOST_GIVEN_UP else float("-inf")
            try:
                return await task
            except asyncio.CancelledError:
                own = asyncio.current_task()
                if task not in self._displaced or (own is not None and own.cancelling()):
                    raise
                given_up += 1
            finally:
                del self._lines[task]
                self._displaced.discard(task)
                self.used -= 1
                self._left.set()

    def make_way(self, is_first: bool) -> None:
        """Cancels lines younger than YOUNG_S when another request arrives. Older lines run to their end.

        Args:
            is_first: Whether no other request was open. All young lines are then cancelled; otherwise only the lines beyond
                `beside`.
        """
        now = self._clock()
        excess = self.used - len(self._displaced) - (0 if is_first else min(self._beside, self._most))
        young = [task for task, begun in self._lines.items() if now - begun < YOUNG_S and task not in self._displaced]
        for task in young[-excess:] if excess > 0 else []:
            if task.cancel():
                self._displaced.add(task)

    async def close(self) -> None:
        """Lets no more lines start, and returns when all lanes are free."""
        self._closed = True
        while self.used:
            await self._look()

    async def _enter(self) -> None:
        async with self._turn:
            since: float | None = None  # time since which a lane is free; None while all lanes are in use
            while not self._may_begin(since):
                since = (self._clock() if since is None else since) if self._has_lane else None
                await self._look()
            self.used += 1

    def _may_begin(self, since: float | None) -> bool:
        held_s = 0.0 if since is None else self._clock() - since
        return self.is_open and (held_s >= HELD_S or self._quiet_s() > 0)

    @property
    def is_open(self) -> bool:
        """Whether a lane is free and no choice waits for a worker."""
        return self._has_lane and not self._waiting()

    @property
    def _has_lane(self) -> bool:
        return not self._closed and self.used + 1 <= min(self._most, self._beside + self._more)

    @property
    def _more(self) -> float:
        """Number of lanes, as a fraction, that a period without other requests has opened. Infinite before the first request."""
        since_s = self._quiet_s() - QUIET_S
        return 1 + since_s / RISE_S if since_s >= 0 else 0.0

    async def _look(self) -> None:
        """Returns when a line has left its lane, or after LOOK_S."""
        self._left.clear()
        try:
            async with asyncio.timeout(LOOK_S):
                await self._left.wait()
        except TimeoutError:
            return
