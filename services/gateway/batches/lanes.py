"""Limits the batch lines that a gateway computes at once, so that batches use only capacity that other requests leave free.

A line needs a lane while it is computed. "Other requests" are the requests that clients wait for.

| situation | number of lanes |
| --- | --- |
| no other request since the start of the gateway | `most` |
| other requests are open, or the last one ended within QUIET_S | `beside` |
| no other request for QUIET_S | `beside`, then one more per RISE_S, up to `most` |
| a choice waits for a worker | no line starts |

If another request arrives, lines that have just started are cancelled and computed later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_S = 0.05  # seconds between two checks for a lane while a line waits
YOUNG_S = 2.0  # largest age in seconds at which a line may be cancelled
# Seconds after which a waiting line starts in a free lane although another request is open. If no other request is open, the line
# starts at once.
FREE_LANE_S = 0.5
MAX_DISPLACEMENTS = 3  # largest number of cancellations of one line
QUIET_S = 5.0  # seconds without other requests after which more than `beside` lanes open; gaps in interactive use are shorter
RISE_S = 0.5  # seconds between the opening of two lanes, so that requests after a short gap find few running lines


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
            beside: Largest number of lines at once while other requests are open, and for QUIET_S afterwards.
            waiting: Returns the number of choices that wait in this gateway or in a worker's queue.
            quiet_s: Returns the seconds since the last other request ended; 0.0 while one is open.
            clock: Returns seconds.
        """
        self._most, self._beside = most, beside
        self._waiting = waiting
        self._quiet_s = quiet_s
        self._turn = asyncio.Lock()
        self._lane_freed = asyncio.Event()
        self._clock = clock
        self._lines: dict[asyncio.Task[Any], float] = {}  # start of each line; -inf if it may not be cancelled again
        self._displaced: set[asyncio.Task[Any]] = set()  # lines that displace_young_lines() has cancelled and that have not ended
        self._closed = False
        self.used = 0  # number of lanes in which a line is computed

    async def run_line(self, compute: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Waits for a lane in order of arrival, calls `compute` in it and returns the result.

        If displace_young_lines() cancels the call, waits for a lane and calls `compute` again.
        """
        num_displaced = 0
        while True:
            await self._enter()
            task = asyncio.create_task(compute())
            self._lines[task] = self._clock() if num_displaced < MAX_DISPLACEMENTS else float("-inf")
            try:
                return await task
            except asyncio.CancelledError:
                own = asyncio.current_task()
                if task not in self._displaced or (own is not None and own.cancelling()):
                    raise
                num_displaced += 1
            finally:
                del self._lines[task]
                self._displaced.discard(task)
                self.used -= 1
                self._lane_freed.set()

    def displace_young_lines(self, is_first: bool) -> None:
        """Cancels lines younger than YOUNG_S when another request arrives. Older lines run to their end.

        Args:
            is_first: True cancels all young lines, because no other request was open before. False cancels only the newest lines
                beyond `beside`.
        """
        now = self._clock()
        excess = self.used - len(self._displaced) - (0 if is_first else min(self._beside, self._most))
        young = [task for task, begun in self._lines.items() if now - begun < YOUNG_S and task not in self._displaced]
        for task in young[-excess:] if excess > 0 else []:
            if task.cancel():
                self._displaced.add(task)

    async def close(self) -> None:
        """Starts no more lines, and returns when all lanes are free."""
        self._closed = True
        while self.used:
            await self._wait_for_change()

    async def _enter(self) -> None:
        async with self._turn:
            since: float | None = None  # time since which a lane is free, or None while all lanes are in use
            while not self._may_begin(since):
                since = (self._clock() if since is None else since) if self._has_lane else None
                await self._wait_for_change()
            self.used += 1

    def _may_begin(self, since: float | None) -> bool:
        free_s = 0.0 if since is None else self._clock() - since
        return self.is_open and (free_s >= FREE_LANE_S or self._quiet_s() > 0)

    @property
    def is_open(self) -> bool:
        """Whether a lane is free and no choice waits for a worker."""
        return self._has_lane and not self._waiting()

    @property
    def _has_lane(self) -> bool:
        return not self._closed and self.used + 1 <= min(self._most, self._beside + self._num_opened)

    @property
    def _num_opened(self) -> float:
        """Number of lanes beyond `beside`: 0 until QUIET_S after the last other request, then 1, growing by 1 per RISE_S.

        Infinite if there was no other request yet.
        """
        since_s = self._quiet_s() - QUIET_S
        return 1 + since_s / RISE_S if since_s >= 0 else 0.0

    async def _wait_for_change(self) -> None:
        """Returns when a lane becomes free, or after LOOK_S."""
        self._lane_freed.clear()
        try:
            async with asyncio.timeout(LOOK_S):
                await self._lane_freed.wait()
        except TimeoutError:
            return
