"""Drains a worker: it refuses new requests, waits for running requests, and aborts those that are unfinished at the end."""

from __future__ import annotations

import asyncio
import logging
import signal

from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.worker.front.outbox import LoadReport, StreamOutbox
from rootstock_llm.services.worker.loop.loop import STOPPING
from rootstock_llm.services.worker.loop.thread import SchedulerThread

LOOK_S = 0.05  # seconds between two checks whether KV reservations are open
STEP_S = 1.0  # seconds that the step in flight may take after the grace period

logger = logging.getLogger(__name__)


async def drain(outbox: StreamOutbox, load: LoadReport, scheduler: SchedulerThread, grace_s: float) -> None:
    """Drains the worker for at most `grace_s` seconds.

    The wait ends when every request has ended and every KV reservation has been read or has expired, or at the next SIGTERM or
    SIGINT. Another signal kills the process. Unfinished requests then end as unavailable, after all their sampled tokens, and
    each stream ends when its gateway has received this.
    """
    outbox.closed = STOPPING
    load.tell()
    empty = asyncio.create_task(_wait_until_idle(outbox, load))
    hurry = asyncio.create_task(grpc_server.stop_signal().wait())
    await asyncio.wait((empty, hurry), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if hurry.done():
        logger.warning("second signal: the worker stops without waiting for %d open requests", outbox.num_open)
    for task in (empty, hurry):
        task.cancel()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    await scheduler.stop(STEP_S)
    outbox.end()


async def _wait_until_idle(outbox: StreamOutbox, load: LoadReport) -> None:
    await outbox.wait_empty()
    while load.num_rooms:
        await asyncio.sleep(LOOK_S)
