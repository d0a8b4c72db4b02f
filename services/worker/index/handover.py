"""Cache events on their way from the loop's thread to the asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.worker.core.kv.cache_events import CacheEvents


class CacheEventHandover:
    """put() costs the loop's thread an append; the asyncio loop is woken once for all that has gathered."""

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
        if not self._queue:
            return
        self._deliver(self._queue.popleft())
        if self._queue and not self._scheduled:  # one at a time: what else the loop has to do goes on in between
            self._scheduled = True
            self._loop.call_soon(self._run)
