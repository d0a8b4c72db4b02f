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
from services.gateway.request.errors import KEY_NOT_HERE, ApiError
from services.gateway.state.batch_record import BatchOrder, BatchStatus, Unreadable
from services.gateway.state.batch_store import BatchStore, WaitingBatch, batch_lease
from services.gateway.state.file_store import FileStore
from services.gateway.state.lease import Lease, LeaseLost, Leases
from services.gateway.state.state_store import StoreAway
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # at what there is to do, and at what has been cancelled; leases are kept as often
AT_ONCE = 4  # batches of one gateway: others wait, or other gateways have them
ENDING_AT_ONCE = 4  # beside these, that are cancelled or expired before they had a place
SEEN = 200  # of those that wait
LEAVE_S = 1.0  # for giving leases back


@dataclass(frozen=True, slots=True)
class RunnerStores:
    batches: BatchStore
    files: FileStore
    leases: Leases


class BatchRunner:
    """callers: see BatchWork. lines_at_once: of each batch. most_lines: of an input. clock: Unix
    seconds."""

    def __init__(
        self,
        stores: RunnerStores,
        calls: LineCalls,
        lanes: Lanes,
        callers: Callable[[str, float], Caller],
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
        self._runs: dict[BatchRun, asyncio.Task[None]] = {}  # in the order in which they began
        self._ending: set[BatchRun] = set()  # of them, that had no place when they were to end
        self._unknown: dict[str, BatchOrder] = {}  # by owner, whose key has not come here yet
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
        """No more lines begin. Returns once those that are being answered are, and the store has their answers."""
        self._stopping = True
        await self._lanes.close()
        await asyncio.gather(*(run.recorded() for run in self._runs))

    async def _look(self) -> None:
        try:
            for run in list(self._runs):
                await self._look_after(run)
            if not self._stopping:
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
            self._ending.discard(run)
            await self._ended(run, task)
            return
        if not await stores.leases.keep(run.lease):
            logger.warning("another gateway goes on with a batch", extra=fields(batch=run.order.id))
            task.cancel()
            return
        try:
            record = await stores.batches.get(run.order.owner, run.order.id)
        except Unreadable as unreadable:
            logger.warning("a gateway of another version goes on with a batch: %s", unreadable, extra=fields(batch=run.order.id))
            task.cancel()
            return
        if record is None or not record.is_open:
            task.cancel()  # another one had the lease meanwhile, and has ended it
        elif record.status is BatchStatus.CANCELLING:
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
        """Who has few batches at work here goes before who has many, an older batch before a younger one. What is to end waits
        for no place."""
        self._unknown = {owner: order for owner, order in self._unknown.items() if self._may_know_later(order)}
        waiting = await self._stores.batches.waiting(SEEN, AT_ONCE, int(self._clock()))
        for batch in waiting:
            if batch.ends and len(self._ending) < ENDING_AT_ONCE:
                await self._take(batch, self._ending)
        queue = [batch for batch in waiting if not batch.ends and batch.owner not in self._unknown]
        while queue and len(self._runs) - len(self._ending) < AT_ONCE:
            batch = min(queue, key=lambda each: len(self._of(each.owner)))
            queue.remove(batch)
            await self._take(batch, None)
        if any(not self._of(batch.owner) for batch in queue):
            self._make_way()

    def _of(self, owner: str) -> list[BatchRun]:
        """Its batches that have a place, the youngest last."""
        return [run for run in self._runs if run.order.owner == owner and run not in self._ending]

    def _make_way(self) -> None:
        """Somebody who has no batch at work waits: one of whoever has most of them goes on later, if that has several. Of its
        lines those that are being answered are computed again."""
        if any(task.cancelling() for run, task in self._runs.items() if run not in self._ending):
            return  # one does already
        most = max((self._of(run.order.owner) for run in self._runs if run not in self._ending), key=len, default=[])
        if len(most) > 1:
            logger.info("a batch makes way for another key's", extra=fields(batch=most[-1].order.id))
            self._runs[most[-1]].cancel()

    async def _take(self, batch: WaitingBatch, into: set[BatchRun] | None) -> None:
        """into: what it is counted among, besides all. Of one that cannot be read the lease runs out: so the next try, by a
        gateway that can, perhaps, is not at once."""
        lease = await self._stores.leases.take(batch_lease(batch.owner, batch.id))
        try:
            run = None if lease is None else await self._begin(batch.owner, batch.id, lease)
        except Unreadable as unreadable:
            logger.warning("%s", unreadable, extra=fields(batch=batch.id))
            return
        if run is not None and into is not None:
            into.add(run)

    async def _begin(self, owner: str, batch_id: str, lease: Lease) -> BatchRun | None:
        stores = self._stores
        record = await stores.batches.get(owner, batch_id)
        if record is None or not record.is_open:
            await stores.batches.forget(owner, batch_id)
            await stores.leases.give_back(lease)
            return None
        order = record.order
        is_to_end = record.status is BatchStatus.CANCELLING or self._clock() >= order.expires_at
        if not is_to_end and self._may_know_later(order):  # meanwhile a gateway that does takes it
            self._unknown[owner] = order
            await stores.leases.give_back(lease)
            return None
        run = BatchRun(
            lease,
            order,
            stores.batches,
            stores.files,
            self._calls,
            self._lanes,
            lambda: self._callers(order.key, order.created_at),
            self._lines_at_once,
            self._most_lines,
            self._metrics,
        )
        if self._clock() >= order.expires_at:
            run.stop(EXPIRED)
        self._runs[run] = asyncio.create_task(run.run())
        return run

    def _may_know_later(self, order: BatchOrder) -> bool:
        """Whose it is: its key is not here, and may be on its way."""
        try:
            self._callers(order.key, order.created_at)
        except ApiError as error:
            return error.code == KEY_NOT_HERE
        return False

    async def _leave(self) -> None:
        with suppress(StoreAway, TimeoutError):  # they run out by themselves
            async with asyncio.timeout(LEAVE_S):
                for run in self._runs:
                    await self._stores.leases.give_back(run.lease)
