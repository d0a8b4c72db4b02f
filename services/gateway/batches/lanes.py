"""How many lines of batches a gateway has answered at once: all its lanes while nobody waits for anything else, few while
somebody does, and no new one while anything waits for a worker. So batches have what others leave: lines run in the gaps between
others' requests, make way for who comes, and go on beside others where there are no gaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_S = 0.05  # at what others do, while a line waits
YOUNG_S = 2.0  # that a line may lose
HELD_S = 0.5  # that a line leaves a lane empty while others have requests open: where many come, they always have
MOST_GIVEN_UP = 3  # times; then a line goes on to its end
QUIET_S = 5.0  # without other requests, after which lanes open: their gaps are shorter while people are at work
RISE_S = 0.5  # from one lane that opens to the next: who comes back soon meets few lines


class Lanes:
    """most: lines at once. beside: while others have requests open, or had some a moment ago. waiting: choices that wait for
    a worker, here or at a worker. quiet_s: seconds for which nobody else has had a request open, 0.0 while somebody has. clock:
    seconds."""

    def __init__(
        self,
        most: int,
        beside: int,
        waiting: Callable[[], int],
        quiet_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._beside = most, beside
        self._waiting = waiting
        self._quiet_s = quiet_s
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()
        self._clock = clock
        # Since when, the oldest first; those that have been given up often were always there.
        self._asking: dict[asyncio.Task[Any], float] = {}
        self._displaced: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.used = 0

    async def answer(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What is asked, in a lane that it waits for, in order. Who makes way asks again."""
        given_up = 0
        while True:
            await self._enter()
            asking = asyncio.create_task(ask())
            self._asking[asking] = self._clock() if given_up < MOST_GIVEN_UP else float("-inf")
            try:
                return await asking
            except asyncio.CancelledError:
                own = asyncio.current_task()
                if asking not in self._displaced or (own is not None and own.cancelling()):
                    raise
                given_up += 1
            finally:
                del self._asking[asking]
                self._displaced.discard(asking)
                self.used -= 1
                self._left.set()

    def make_way(self, is_first: bool) -> None:
        """Somebody has come, who waits; is_first: beside nobody else. What has just begun is given up, little of which is lost:
        all of it behind a gap, else what is too much beside others. What is older goes on to its end."""
        now = self._clock()
        excess = self.used - len(self._displaced) - (0 if is_first else min(self._beside, self._most))
        young = [asking for asking, begun in self._asking.items() if now - begun < YOUNG_S and asking not in self._displaced]
        for asking in young[-excess:] if excess > 0 else []:
            if asking.cancel():
                self._displaced.add(asking)

    async def close(self) -> None:
        """Nobody enters any more. Returns once all have left."""
        self._closed = True
        while self.used:
            await self._look()

    async def _enter(self) -> None:
        async with self._turn:
            since: float | None = None  # there is a lane
            while not self._may_begin(since):
                since = (self._clock() if since is None else since) if self._has_lane else None
                await self._look()
            self.used += 1

    def _may_begin(self, since: float | None) -> bool:
        held_s = 0.0 if since is None else self._clock() - since
        return self.is_open and (held_s >= HELD_S or self._quiet_s() > 0)

    @property
    def is_open(self) -> bool:
        """Whether one more may enter."""
        return self._has_lane and not self._waiting()

    @property
    def _has_lane(self) -> bool:
        return not self._closed and self.used + 1 <= min(self._most, self._beside + self._more)

    @property
    def _more(self) -> float:
        """Lanes beyond those beside others, the last one in part; without end where nobody has been there yet."""
        since_s = self._quiet_s() - QUIET_S
        return 1 + since_s / RISE_S if since_s >= 0 else 0.0

    async def _look(self) -> None:
        """Returns when one has left, or soon."""
        self._left.clear()
        try:
            async with asyncio.timeout(LOOK_S):
                await self._left.wait()
        except TimeoutError:
            return
