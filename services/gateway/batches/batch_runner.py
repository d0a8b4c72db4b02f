"""Finds batches that nobody runs, and runs them for as long as it has their leases: any gateway any batch, one at a time each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from services.gateway.batches.batch_run import BatchRun
from services.gateway.batches.lanes import Lanes
from services.gateway.batches.line_call import LineCalls
from services.gateway.batches.line_results import CANCELLED, EXPIRED
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.caller import Caller
from services.gateway.state.batch_record import Status
from services.gateway.state.batch_store import BatchStore, batch_lease
from services.gateway.state.file_store import FileStore
from services.gateway.state.lease import Lease, LeaseLost, Leases
from services.gateway.state.state_store import StoreAway
from services.shared.observe.log import fields

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # at what there is to do, and at what has been cancelled; leases are kept as often
AT_ONCE = 4  # batches of one gateway: others wait, or other gateways have them
SEEN = 200  # of those that wait
LEAVE_S = 1.0  # for giving leases back


@dataclass(frozen=True, slots=True)
class RunnerStores:
    batches: BatchStore
    files: FileStore
    leases: Leases


class BatchRunner:
    """callers: who has the key of a name; raises ApiError. lines_at_once: of each batch. most_lines: of an input. clock: Unix
    seconds."""

    def __init__(
        self,
        stores: RunnerStores,
        calls: LineCalls,
        lanes: Lanes,
        callers: Callable[[str], Caller],
        lines_at_once: int,
        most_lines: int,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stores = stores
        self._calls, self._lanes = calls, lanes
        self._callers = callers
        self._lines_at_once, self._most_lines = lines_at_once, most_lines
        self._metrics = metrics
        self._clock = clock
        self._runs: dict[BatchRun, asyncio.Task[None]] = {}
        self._stopping = False
        self._is_away = False
        metrics.watch_batches(lambda: len(self._runs), lambda: lanes.used)

    async def run(self) -> None:
        """Until cancelled; what is unfinished then goes on elsewhere."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._runs.values():
                task.cancel()
            await asyncio.gather(*self._runs.values(), return_exceptions=True)
            await self._leave()

    async def drain(self) -> None:
        """No more lines begin. Returns once those that are being answered are."""
        self._stopping = True
        await self._lanes.close()

    async def _look(self) -> None:
        try:
            for run in list(self._runs):
                await self._look_after(run)
            if not self._stopping and len(self._runs) < AT_ONCE:
                await self._find()
        except StoreAway as away:
            if not self._is_away:
                logger.warning("batches wait for the store: %s", away)
            self._is_away = True
        else:
            self._is_away = False

    async def _look_after(self, run: BatchRun) -> None:
        task, stores = self._runs[run], self._stores
        if task.done():
            del self._runs[run]
            await self._ended(run, task)
            return
        if not await stores.leases.keep(run.lease):
            logger.warning("another gateway goes on with a batch", extra=fields(batch=run.order.id))
            task.cancel()
            return
        record = await stores.batches.get(run.order.owner, run.order.id)
        if record is None or not record.is_open:
            task.cancel()  # another one had the lease meanwhile, and has ended it
        elif record.status is Status.CANCELLING:
            run.stop(CANCELLED)
        elif self._clock() >= run.order.expires_at:
            run.stop(EXPIRED)

    async def _ended(self, run: BatchRun, task: asyncio.Task[None]) -> None:
        """After a fault its lease is left to run out: so the next try, here or elsewhere, is not at once."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            await self._stores.leases.give_back(run.lease)
        elif isinstance(error, LeaseLost):
            logger.warning("another gateway goes on with a batch", extra=fields(batch=run.order.id))
        else:
            logger.error("a batch has met a fault", extra=fields(batch=run.order.id), exc_info=error)

    async def _find(self) -> None:
        mine = {(run.order.owner, run.order.id) for run in self._runs}
        for owner, batch_id in await self._stores.batches.open_batches(SEEN):
            if len(self._runs) >= AT_ONCE:
                return
            if (owner, batch_id) not in mine:
                lease = await self._stores.leases.take(batch_lease(owner, batch_id))
                if lease is not None:
                    await self._begin(owner, batch_id, lease)

    async def _begin(self, owner: str, batch_id: str, lease: Lease) -> None:
        stores = self._stores
        record = await stores.batches.get(owner, batch_id)
        if record is None or not record.is_open:
            await stores.batches.forget(owner, batch_id)
            await stores.leases.give_back(lease)
            return
        order = record.order
        run = BatchRun(
            lease,
            order,
            stores.batches,
            stores.files,
            self._calls,
            self._lanes,
            lambda: self._callers(order.key),
            self._lines_at_once,
            self._most_lines,
            self._metrics,
        )
        if self._clock() >= order.expires_at:
            run.stop(EXPIRED)
        self._runs[run] = asyncio.create_task(run.run())

    async def _leave(self) -> None:
        with suppress(StoreAway, TimeoutError):  # they run out by themselves
            async with asyncio.timeout(LEAVE_S):
                for run in self._runs:
                    await self._stores.leases.give_back(run.lease)
