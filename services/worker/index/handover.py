"""The way of cache events from the loop's thread to the asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.worker.core.kv.cache_events import CacheEvents

BLOCKS_A_TURN = 4096  # limit per turn of the asyncio loop, so that its other work continues


class CacheEventHandover:
    """A queue between the two threads.

    put() costs the loop's thread one append. The asyncio loop wakes up once for all queued events and takes at most about
    BLOCKS_A_TURN blocks per turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[CacheEvents], None]) -> None:
        self._loop, self._deliver = loop, deliver
        self._queue: deque[CacheEvents] = deque()
        self._scheduled = False

    def put(self, events: CacheEvents) -> None:
        """Queues events. One thread calls it, in order."""
        self._queue.append(events)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._scheduled = False  # must come first: events queued later are taken below or schedule another run
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
