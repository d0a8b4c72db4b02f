"""How many lines of batches a gateway has answered at once: all its lanes while nobody waits for anything else, few while
somebody does, and no new one while anything waits for a worker. So batches have what others leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LOOK_S = 0.05  # at what others do, while a line waits
QUIET_S = 5.0  # without other requests, after which all lanes are open: their gaps are shorter while people are at work


class Lanes:
    """most: lines at once. beside: while others have requests open, or had some a moment ago. waiting: choices that wait for
    a worker, here or at a worker. quiet_s: seconds for which nobody else has had a request open."""

    def __init__(self, most: int, beside: int, waiting: Callable[[], int], quiet_s: Callable[[], float]) -> None:
        self._most, self._beside = most, beside
        self._waiting = waiting
        self._quiet_s = quiet_s
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()
        self._closed = False
        self.used = 0

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[None]:
        """Waits for one, in order, and has it for the block."""
        await self._enter()
        try:
            yield
        finally:
            self.used -= 1
            self._left.set()

    async def close(self) -> None:
        """Nobody enters any more. Returns once all have left."""
        self._closed = True
        while self.used:
            await self._look()

    async def _enter(self) -> None:
        async with self._turn:
            while not self.is_open:
                await self._look()
            self.used += 1

    @property
    def is_open(self) -> bool:
        """Whether one more may enter."""
        if self._closed or self._waiting():
            return False
        return self.used < (self._most if self._quiet_s() >= QUIET_S else min(self._beside, self._most))

    async def _look(self) -> None:
        """Returns when one has left, or soon."""
        self._left.clear()
        try:
            async with asyncio.timeout(LOOK_S):
                await self._left.wait()
        except TimeoutError:
            return
