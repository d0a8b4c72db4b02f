"""Makes the stores, the lanes and the runner of batches. services/gateway/api/batches has the HTTP routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rootstock_llm.services.gateway.batches.batch_runner import BatchRunner, RunnerStores
from rootstock_llm.services.gateway.batches.lanes import Lanes
from rootstock_llm.services.gateway.batches.line_call import LineCalls
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.observe.access_log import AccessLog
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics, StoreSigns
from rootstock_llm.services.gateway.service.service import Attendance
from rootstock_llm.services.gateway.service.sink import MakeOperation, RunGeneration
from rootstock_llm.services.gateway.store.batch_store import BatchStore
from rootstock_llm.services.gateway.store.file_store import FileStore
from rootstock_llm.services.gateway.store.lease import Leases
from rootstock_llm.services.gateway.store.state_redis import StateRedis
from rootstock_llm.services.gateway.store.state_store import StoreAway

MEMORY_LOOK_S = 5.0  # seconds between two reads of the store's memory usage


class BatchWork:
    """The batches of this gateway: their stores, lanes and runner."""

    def __init__(
        self,
        settings: GatewaySettings,
        run: RunGeneration,
        operations: Mapping[str, MakeOperation],
        callers: Callable[[str, float], Caller],
        waiting: Callable[[], int],
        attendance: Attendance,
        metrics: GatewayMetrics,
        access: AccessLog,
    ) -> None:
        """Makes the stores, the lanes and the runner. Nothing runs before run().

        Args:
            run: GenerationService.run.
            operations: Operations of lines by path. The caller fills the mapping before run().
            callers: Returns the caller for an API key's name and the Unix time of the client's request. Raises ApiError.
            waiting: Returns the number of choices that wait in this gateway or in a worker's queue.
            attendance: Counts the open requests that clients wait for.

        Raises:
            ValueError: The store's URL is not valid.
        """
        self._memory: tuple[int, int] | None = None  # memory usage of the store, see StoreSigns, or None if unknown
        self._redis = StateRedis(settings.state_redis_url, settings.state_patience_s)
        leases = Leases(self._redis, settings.batch_lease_s)
        most, most_bytes = settings.state_records_per_key, settings.file_bytes_per_key
        self.files = FileStore(self._redis, most, most_bytes)
        self.batches = BatchStore(self._redis, leases, settings.state_ttl_s, most, most_bytes)
        lanes = Lanes(settings.batch_lines, settings.batch_lines_beside, waiting, lambda: attendance.quiet_s)
        attendance.listen(lanes.displace_young_lines)
        low_first = settings.schedule_low_priority_values_first
        self._runner: BatchRunner | None = None
        if settings.batch_lines:
            metrics.watch_store(StoreSigns(lambda: not self._redis.is_away, lambda: self._memory))
            self._runner = BatchRunner(
                RunnerStores(self.batches, self.files, leases),
                LineCalls(run, operations, access, settings.max_body_bytes),
                lanes,
                lambda name, asked_at: callers(name, asked_at).in_background(low_first),
                settings.batch_lines_each,
                settings.max_batch_lines,
                metrics,
            )

    async def run(self) -> None:
        """Runs batches until cancelled."""
        if self._runner is None:
            await asyncio.Event().wait()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._runner.run())
            group.create_task(self._watch_memory())

    async def _watch_memory(self) -> None:
        while True:
            try:
                self._memory = await self._redis.memory()
            except StoreAway:
                self._memory = None
            await asyncio.sleep(MEMORY_LOOK_S)

    async def drain(self) -> None:
        """Starts no more lines, and returns when the results of the running lines are stored."""
        if self._runner is not None:
            await self._runner.drain()

    async def close(self) -> None:
        await self._redis.close()
