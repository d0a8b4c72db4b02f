"""Drains a worker: refuses new requests, waits for open requests, and ends unfinished requests after the grace period."""

from __future__ import annotations

import asyncio
import logging
import signal

from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.worker.front.outbox import LoadReport, StreamOutbox
from rootstock_llm.services.worker.loop.loop import STOPPING
from rootstock_llm.services.worker.loop.thread import SchedulerThread

POLL_S = 0.05  # seconds between two checks for open KV reservations
STEP_S = 1.0  # seconds that the step in flight may take after the grace period

logger = logging.getLogger(__name__)


async def drain(outbox: StreamOutbox, load: LoadReport, scheduler: SchedulerThread, grace_s: float) -> None:
    """Drains the worker.

    1. Refuses new requests, and waits up to `grace_s` seconds. The wait ends earlier when every request has ended and every KV
       reservation has been read or has expired, or at the next SIGTERM or SIGINT. Any later signal kills the process.
    2. Sends the remaining sampled tokens of unfinished requests and ends these requests with the error UNAVAILABLE.
    3. Ends the gateway streams.
    """
    outbox.closed = STOPPING
    load.send_due()
    idle = asyncio.create_task(_wait_until_idle(outbox, load))
    second_signal = asyncio.create_task(grpc_server.stop_signal().wait())
    await asyncio.wait((idle, second_signal), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if second_signal.done():
        logger.warning("second signal: the worker stops without a wait for its %d open requests", outbox.num_open)
    for task in (idle, second_signal):
        task.cancel()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    await scheduler.stop(STEP_S)
    outbox.end()


async def _wait_until_idle(outbox: StreamOutbox, load: LoadReport) -> None:
    await outbox.wait_empty()
    while load.num_reservations:
        await asyncio.sleep(POLL_S)
