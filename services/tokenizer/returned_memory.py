"""Memory that large requests have left free inside the process goes back to the system. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Executor

from services.shared.c_memory import return_freed

PAUSE_S = 1.0  # after the last large request


class ReturnedMemory:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._timer: asyncio.TimerHandle | None = None

    async def now(self) -> None:
        """What gRPC has received a large message in is free by the time that its call begins."""
        await asyncio.get_running_loop().run_in_executor(self._executor, return_freed)

    def soon(self) -> None:
        """A large request has ended: to be called for each of them."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._executor.submit, self._return)

    def _return(self) -> None:
        gc.collect()  # a call that was refused is in a cycle with its traceback
        return_freed()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
