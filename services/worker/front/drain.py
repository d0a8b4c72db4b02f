"""How the worker goes away: nothing new is taken, what runs may end, the rest is handed back with all that was sampled."""

from __future__ import annotations

import asyncio
import logging
import signal

from services.shared.rpc import grpc_server
from services.worker.front.busyness import LoadReport
from services.worker.front.outbox import StreamOutbox
from services.worker.loop.loop import STOPPING
from services.worker.loop.thread import SchedulerThread

LOOK_S = 0.05  # between two looks at whether rooms are left
STEP_S = 1.0  # for the steps in flight when the grace period is over

logger = logging.getLogger(__name__)


async def drain(outbox: StreamOutbox, load: LoadReport, scheduler: SchedulerThread, grace_s: float) -> None:
    """On return every request that was here has its terminal output, and streams end when that is taken; what was kept for others
    has been read, or its time was over. A further signal ends the wait; one after that kills the process."""
    outbox.closed = STOPPING
    load.tell()
    empty = asyncio.create_task(_nobody_is_left(outbox, load))
    hurry = asyncio.create_task(grpc_server.stop_signal().wait())
    await asyncio.wait((empty, hurry), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if hurry.done():
        logger.warning("a second signal: not waiting for %d open requests", outbox.num_open)
    for task in (empty, hurry):
        task.cancel()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    await scheduler.stop(STEP_S)
    outbox.end()


async def _nobody_is_left(outbox: StreamOutbox, load: LoadReport) -> None:
    await outbox.wait_empty()
    while load.num_rooms:
        await asyncio.sleep(LOOK_S)
