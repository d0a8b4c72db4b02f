"""The thread that the loop runs on: the only one that touches core, executor and grammars' matchers."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

from services.worker.loop.inbox import Inbox, Stop
from services.worker.loop.loop import Loop

logger = logging.getLogger(__name__)

EXIT_STATUS = 70  # the loop has died or hangs; a restart is the cure


class SchedulerThread:
    """prepare: what the thread does before the loop."""

    def __init__(self, loop: Loop, inbox: Inbox, prepare: Callable[[], None] = lambda: None) -> None:
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
        """Ends the loop, and what is left in it. Waits so long for the steps that it has in flight."""
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join, timeout_s)
        if not self.ended:
            logger.critical("the scheduler's loop has not ended in %.1f s", timeout_s)

    def leave_if_alive(self) -> None:
        """Ends the process if the loop has not ended: nothing that it uses can be closed."""
        if not self.ended:
            logging.shutdown()
            os._exit(EXIT_STATUS)

    def _run(self) -> None:
        """The loop raises nothing it knows; anything else is a bug."""
        try:
            self._prepare()
            self._loop.run()
        except BaseException:
            logger.critical("the scheduler's loop has died", exc_info=True)
            logging.shutdown()
            os._exit(EXIT_STATUS)
