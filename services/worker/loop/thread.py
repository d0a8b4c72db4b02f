"""Runs the scheduler loop on its own thread. Only this thread uses the core, the executor and the grammar matchers."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

from rootstock_llm.services.worker.loop.inbox import Inbox, Stop
from rootstock_llm.services.worker.loop.loop import Loop

logger = logging.getLogger(__name__)

EXIT_STATUS = 70  # exit status if the loop has died or hangs; Kubernetes then restarts the container


class SchedulerThread:
    """The thread of one loop."""

    def __init__(self, loop: Loop, inbox: Inbox, prepare: Callable[[], None] = lambda: None) -> None:
        """Creates the thread without starting it. `prepare` runs on the thread before the loop."""
        self._loop = loop
        self._inbox = inbox
        self._prepare = prepare
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    async def stop(self, timeout_s: float) -> None:
        """Ends the loop and all requests. Waits up to `timeout_s` seconds for the end of the thread."""
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join, timeout_s)
        if not self.ended:
            logger.critical("the scheduler's loop has not ended in %.1f s", timeout_s)

    def exit_if_alive(self) -> None:
        """Ends the process if the loop still runs, because the executor cannot be closed while the loop uses it."""
        if not self.ended:
            logging.shutdown()
            os._exit(EXIT_STATUS)

    def _run(self) -> None:
        """Runs the loop. Any exception is a bug and ends the process, because the loop handles all expected errors itself."""
        try:
            self._prepare()
            self._loop.run()
        except BaseException:
            logger.critical("the scheduler's loop has died", exc_info=True)
            logging.shutdown()
            os._exit(EXIT_STATUS)
