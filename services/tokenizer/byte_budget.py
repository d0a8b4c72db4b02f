"""Bytes of requests that are worked on at the same time: first come, first served, and refused after a while.

Belongs to one event loop. What is larger than the whole budget holds all of it. Each hold ends exactly once, also where its
caller is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.tokenizer.refusal import busy


class ByteBudget:
    def __init__(self, size: int, wait_s: float) -> None:
        self._free = self._size = size
        self._wait_s = wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        return self._size - self._free

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Raises Refusal where it stays full."""
        share = min(size, self._size)
        await self._take(share)
        try:
            yield
        finally:
            self._free += share
            self._give()

    async def _take(self, share: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        self._give()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            self._leave(share, turn)
            if isinstance(error, TimeoutError):
                raise busy("the tokenizer has as much text as it can take, try again later") from None
            raise

    def _leave(self, share: int, turn: asyncio.Future[None]) -> None:
        """Whoever has its share already gives it back."""
        if turn.done() and not turn.cancelled():
            self._free += share
        elif (share, turn) in self._waiting:
            self._waiting.remove((share, turn))
        self._give()

    def _give(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            share, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= share
                turn.set_result(None)
