"""Memory that large requests have left free inside the process goes back to the system. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from concurrent.futures import Executor

PAUSE_S = 1.0  # after the last large request


class ReturnedMemory:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries may not
        self._timer: asyncio.TimerHandle | None = None

    async def now(self) -> None:
        """What gRPC has received a large message in is free by the time that its call begins."""
        if self._trim is not None:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._trim, 0)

    def soon(self) -> None:
        """A large request has ended: to be called for each of them."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._executor.submit, self._return)

    def _return(self) -> None:
        gc.collect()  # a call that was refused is in a cycle with its traceback
        if self._trim is not None:
            self._trim(0)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
