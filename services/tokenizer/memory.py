"""Limits the memory of requests: a byte budget for requests in progress, and trimming of the heap after large requests.

Objects of this file must be used on one event loop.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from rootstock_llm.services.shared.memory import trim_heap
from rootstock_llm.services.tokenizer.refusal import busy

TRIM_DELAY_S = 1.0  # seconds from the end of the last large request until the heap is trimmed


class ByteBudget:
    """A limit on the total bytes of requests in progress. Requests get their shares in order of arrival.

    A request that is larger than the budget gets the whole budget. Each share is returned exactly once, even if the request is
    cancelled while it waits.
    """

    def __init__(self, size: int, wait_s: float) -> None:
        """Creates a budget.

        Args:
            wait_s: seconds that a request waits for its share before it is refused.
        """
        self._free = self._size = size
        self._wait_s = wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Bytes of the shares in use."""
        return self._size - self._free

    @asynccontextmanager
    async def share(self, size: int) -> AsyncIterator[None]:
        """Waits for a share of `size` bytes, which is returned when the context ends. Raises Refusal after `wait_s`."""
        granted = min(size, self._size)
        await self._acquire(granted)
        try:
            yield
        finally:
            self._free += granted
            self._serve_waiting()

    async def _acquire(self, share: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, granted))
        self._serve_waiting()
        try:
            async with asyncio.timeout(self._wait_s):
                await granted
        except BaseException as error:
            self._withdraw(share, granted)
            if isinstance(error, TimeoutError):
                raise busy("the tokenizer is busy with other requests; retry later") from None
            raise

    def _withdraw(self, share: int, granted: asyncio.Future[None]) -> None:
        """Removes the request from the queue. If its share has already been granted, makes the share available again."""
        if granted.done() and not granted.cancelled():
            self._free += share
        elif (share, granted) in self._waiting:
            self._waiting.remove((share, granted))
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            share, granted = self._waiting.popleft()
            if not granted.done():
                self._free -= share
                granted.set_result(None)


class HeapTrimmer:
    """Returns memory to the operating system after large requests have freed it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._timer: asyncio.TimerHandle | None = None

    async def trim(self) -> None:
        """Trims the heap now.

        At the start of a large request, this returns the buffer of the received message, which gRPC has already freed.
        """
        await asyncio.get_running_loop().run_in_executor(self._executor, trim_heap)

    def trim_later(self) -> None:
        """Trims the heap TRIM_DELAY_S after the last call of this method. Must be called at the end of each large request."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._executor.submit, self._collect_and_trim)

    def _collect_and_trim(self) -> None:
        gc.collect()  # frees refused calls, which are in a reference cycle with their tracebacks
        trim_heap()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
