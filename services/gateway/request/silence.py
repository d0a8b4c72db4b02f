"""Comments in a stream that has nothing to say: for clients and proxies that take silence for death.

Who sends is the stream's own task alone; a timer only tells it that it has been silent for long enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Silence:
    """of_s: seconds of it after which wake() is called, on the event loop; 0: never. It is not called again before said(). One
    timer, which is not set anew for what is said meanwhile."""

    def __init__(self, of_s: float, wake: Callable[[], None]) -> None:
        self._of_s = of_s
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(of_s, self._look) if of_s else None
        self.is_long = False

    def said(self) -> None:
        """Something has been sent."""
        if self._timer is None:
            return
        self._since = self._loop.time()
        if self.is_long:
            self.is_long = False
            self._timer = self._loop.call_at(self._since + self._of_s, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        until = self._since + self._of_s
        if self._loop.time() < until:
            self._timer = self._loop.call_at(until, self._look)
        else:
            self.is_long = True
            self._wake()


async def commented(work: Awaitable[T], silence_s: float, comment: Callable[[], Awaitable[None]]) -> T:
    """The work's result, with a comment after each silence_s seconds that it takes; 0: without. Raises what the work raises."""
    if not silence_s:
        return await work
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=silence_s))[0]:
            await comment()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
