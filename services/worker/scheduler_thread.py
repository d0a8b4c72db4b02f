"""The thread that the loop runs on: the only one that touches core, executor and grammars' matchers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading

from services.worker.inbox import Inbox, Stop
from services.worker.loop import Loop
from services.worker.server import StreamOutbox

logger = logging.getLogger(__name__)

EXIT_STATUS = 70  # the loop has died or hangs; a restart is the cure


class SchedulerThread:
    def __init__(self, loop: Loop, inbox: Inbox, outbox: StreamOutbox) -> None:
        self._loop = loop
        self._inbox, self._outbox = inbox, outbox
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def drain(self, grace_s: float) -> None:
        """Lets what is here end for grace_s seconds, then ends the rest and the loop. Ends the process if the loop hangs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._outbox.wait_empty()
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join, grace_s + 1)
        if self._thread.is_alive():
            logger.critical("the scheduler's loop hangs; leaving without it")
            logging.shutdown()
            os._exit(EXIT_STATUS)

    def _run(self) -> None:
        """The loop raises nothing it knows; anything else is a bug."""
        try:
            self._loop.run()
        except BaseException:
            logger.critical("the scheduler's loop has died", exc_info=True)
            logging.shutdown()
            os._exit(EXIT_STATUS)
