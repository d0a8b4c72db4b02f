"""Cache events on their way from the loop's thread to the asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.worker.core.kv.cache_events import CacheEvents

BLOCKS_A_TURN = 4096  # of the asyncio loop: what else it has to do goes on in between


class CacheEventHandover:
    """put() costs the loop's thread an append; the asyncio loop is woken once for all that has gathered, and takes it by so many
    blocks a turn, in however many messages they come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[CacheEvents], None]) -> None:
        self._loop, self._deliver = loop, deliver
        self._queue: deque[CacheEvents] = deque()
        self._scheduled = False

    def put(self, events: CacheEvents) -> None:
        """From one thread, in order."""
        self._queue.append(events)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False  # first: what is appended from here on is either drained below or schedules another run
        left = BLOCKS_A_TURN
        while self._queue and left > 0:
            events = self._queue.popleft()
            left -= 1 + _num_blocks(events)
            self._deliver(events)
        if self._queue and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)


def _num_blocks(events: CacheEvents) -> int:
    return len(events.stored) + len(events.removed) + len(events.host) + len(events.storage)
