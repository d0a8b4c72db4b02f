"""Finds batches without a lease holder, takes their leases and runs them. Only one gateway at a time runs a batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rootstock_llm.services.gateway.batches.batch_run import BatchRun
from rootstock_llm.services.gateway.batches.lanes import Lanes
from rootstock_llm.services.gateway.batches.line_call import LineCalls
from rootstock_llm.services.gateway.batches.line_results import CANCELLED, EXPIRED
from rootstock_llm.services.gateway.generation.errors import KEY_NOT_HERE, ApiError
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.store.batch_record import BatchOrder, BatchStatus, Unreadable
from rootstock_llm.services.gateway.store.batch_store import BatchStore, WaitingBatch, batch_lease
from rootstock_llm.services.gateway.store.file_store import FileStore
from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost, Leases
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between two rounds, which renew leases, notice cancellations and find batches
AT_ONCE = 4  # largest number of batches that one gateway runs at once
MAX_ENDING = 4  # additional number of cancelled or expired batches, which a gateway only ends
MAX_WAITING = 200  # largest number of waiting batches that one round reads
RELEASE_S = 1.0  # seconds in which a stopping gateway releases its leases


@dataclass(frozen=True, slots=True)
class RunnerStores:
    """The stores that a runner uses."""

    batches: BatchStore
    files: FileStore
    leases: Leases


class BatchRunner:
    """The batches that this gateway runs. Belongs to one event loop."""

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
        """Creates a runner without batches.

        Args:
            callers: See BatchWork.
            lines_at_once: Largest number of lines of one batch in progress, including lines that wait for a retry.
            most_lines: Largest number of lines in an input.
            clock: Returns Unix seconds.
        """
        self._stores = stores
        self._calls, self._lanes = calls, lanes
        self._callers = callers
        self._lines_at_once, self._most_lines = lines_at_once, most_lines
        self._metrics = metrics
        self._clock = clock
        self._runs: dict[BatchRun, asyncio.Task[None]] = {}  # in the order of their start
        # Runs of cancelled or expired batches. They compute no lines, and count against MAX_ENDING instead of AT_ONCE.
        self._ending: set[BatchRun] = set()
        # By owner: a batch whose API key this gateway lacks so far. This gateway takes batches of these owners only to end them.
        self._without_key: dict[str, BatchOrder] = {}
        self._stopping = False
        self._is_away = False  # whether the last round found the store unreachable; an outage is logged once
        metrics.watch_batches(lambda: len(self._runs), lambda: lanes.used)

    async def run(self) -> None:
        """Runs until cancelled, and then releases the leases of unfinished batches to other gateways."""
        try:
            while True:
                await self._run_round()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._runs.values():
                task.cancel()
            await asyncio.gather(*self._runs.values(), return_exceptions=True)
            await self._release_leases()

    async def drain(self) -> None:
        """Starts no more lines, and returns when the results of the running lines are stored."""
        self._stopping = True
        await self._lanes.close()
        await asyncio.gather(*(run.recorded() for run in self._runs))

    async def _run_round(self) -> None:
        try:
            for run in list(self._runs):
                await self._check_run(run)
            if not self._stopping:
                await self._take_waiting()
        except StoreAway as away:
            if not self._is_away:
                logger.warning("batches wait for the store: %s", away)
            self._is_away = True
        else:
            self._is_away = False

    async def _check_run(self, run: BatchRun) -> None:
        task, stores = self._runs[run], self._stores
        if task.done():
            del self._runs[run]
            self._ending.discard(run)
            await self._ended(run, task)
            return
        if not await stores.leases.renew(run.lease):
            logger.warning("another gateway holds the lease of a batch", extra=fields(batch=run.order.id))
            task.cancel()
            return
        try:
            record = await stores.batches.get(run.order.owner, run.order.id)
        except Unreadable as unreadable:
            logger.warning(
                "a gateway of another version has written the record of a batch: %s", unreadable, extra=fields(batch=run.order.id)
            )
            task.cancel()
            return
        if record is None or not record.is_open:
            task.cancel()  # another gateway took the lease and has ended the batch
        elif record.status is BatchStatus.CANCELLING:
            run.stop(CANCELLED)
        elif self._clock() >= run.order.expires_at:
            run.stop(EXPIRED)

    async def _ended(self, run: BatchRun, task: asyncio.Task[None]) -> None:
        """Releases the lease of an ended run.

        After an unexpected error, the lease is not released. Another gateway takes over only after the lease has expired.
        """
        error = None if task.cancelled() else task.exception()
        if error is None:
            await self._stores.leases.release(run.lease)
        elif isinstance(error, LeaseLost):
            logger.warning("another gateway holds the lease of a batch", extra=fields(batch=run.order.id))
        else:
            logger.error("a batch stopped on an unexpected error", extra=fields(batch=run.order.id), exc_info=error)

    async def _take_waiting(self) -> None:
        """Takes waiting batches, up to the limits AT_ONCE and MAX_ENDING.

        The next batch is the oldest one of the owner with the fewest running batches at this gateway.
        """
        self._without_key = {owner: order for owner, order in self._without_key.items() if self._lacks_api_key(order)}
        waiting = await self._stores.batches.waiting(MAX_WAITING, AT_ONCE, int(self._clock()))
        for batch in waiting:
            if batch.ends and len(self._ending) < MAX_ENDING:
                await self._take(batch, self._ending)
        queue = [batch for batch in waiting if not batch.ends and batch.owner not in self._without_key]
        while queue and len(self._runs) - len(self._ending) < AT_ONCE:
            batch = min(queue, key=lambda each: len(self._runs_of(each.owner)))
            queue.remove(batch)
            await self._take(batch, None)
        if any(not self._runs_of(batch.owner) for batch in queue):
            self._pause_batch_of_busiest_owner()

    def _runs_of(self, owner: str) -> list[BatchRun]:
        """Returns the runs of an owner's batches in the order of their start, without the runs in `_ending`."""
        return [run for run in self._runs if run.order.owner == owner and run not in self._ending]

    def _pause_batch_of_busiest_owner(self) -> None:
        """Cancels the newest run of the owner with the most runs, so that an owner without a run gets one.

        Has no effect if no owner has several runs. The cancelled batch continues later, and its running lines are computed again.
        """
        if any(task.cancelling() for run, task in self._runs.items() if run not in self._ending):
            return  # an earlier call has cancelled a run, which has not ended yet
        longest = max((self._runs_of(run.order.owner) for run in self._runs if run not in self._ending), key=len, default=[])
        if len(longest) > 1:
            logger.info("paused a batch to run a batch of another API key", extra=fields(batch=longest[-1].order.id))
            self._runs[longest[-1]].cancel()

    async def _take(self, batch: WaitingBatch, into: set[BatchRun] | None) -> None:
        """Takes a batch if no gateway has its lease, and adds its run to `into` unless this is None.

        If the batch is unreadable, its lease is not released. Another gateway takes over only after the lease has expired. That
        gateway may have another version, which can read the batch.
        """
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
            await stores.leases.release(lease)
            return None
        order = record.order
        is_to_end = record.status is BatchStatus.CANCELLING or self._clock() >= order.expires_at
        if not is_to_end and self._lacks_api_key(order):
            # Releases the lease immediately, so that a gateway with the API key can take the batch.
            self._without_key[owner] = order
            await stores.leases.release(lease)
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

    def _lacks_api_key(self, order: BatchOrder) -> bool:
        """Returns whether this gateway does not have the batch's API key yet. It may get the API key later."""
        try:
            self._callers(order.key, order.created_at)
        except ApiError as error:
            return error.code == KEY_NOT_HERE
        return False

    async def _release_leases(self) -> None:
        with suppress(StoreAway, TimeoutError):  # a lease that is not released expires
            async with asyncio.timeout(RELEASE_S):
                for run in self._runs:
                    await self._stores.leases.release(run.lease)
