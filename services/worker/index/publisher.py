"""Renews this worker's lease and publishes its blocks to Redis, outside of the step path (docs/design/fleet.md#the-index).

All state except the queue of CacheEventHandover changes only on the asyncio loop.

The worker also serves while Redis is unreachable, full or slow. Unpublished changes then accumulate. There is at most one
unpublished change per block: from the block's tier in Redis to its present tier.

If a write failed, Redis was restarted or Redis keys are missing, the content of Redis is uncertain. The publisher then begins a
new generation and publishes all blocks again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from rootstock_llm.services.shared.index.prefix_index import LEASE_TTL_S, RENEW_S, BlockTier
from rootstock_llm.services.shared.index.redis_client import redis_client
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents
from rootstock_llm.services.worker.index.records import CachedBlocks, WorkerRecords
from rootstock_llm.services.worker.index.sweeper import Sweeper

logger = logging.getLogger(__name__)

TIMEOUT_S = RENEW_S  # time limit of one Redis command, in seconds
# Seconds between two batches. If BATCH_BLOCKS changes are pending, the next batch is sent earlier.
PUBLISH_S = 0.1
# Seconds between two batches, per worker of the model. With many workers, the time between batches grows, because every gateway
# reads the batches of all workers.
PUBLISH_S_PER_WORKER = 0.0005
LONGEST_PUBLISH_S = 0.5  # upper limit of the seconds between two batches
BATCH_BLOCKS = 500  # largest number of changed blocks in a batch
BATCH_PAUSE_S = 0.01  # seconds between two full batches, and before a new generation
FIRST_PAUSE_S = 0.1  # seconds between the first failure and the retry; doubled at each consecutive failure
LONGEST_PAUSE_S = 2.0  # upper limit of the seconds before a retry
DELETE_LEASE_S = 1.0  # time limit in seconds of deleting the lease when the worker stops
CALLBACK_BLOCKS = 4096  # blocks after which a callback on the asyncio loop ends, so that it does not delay other callbacks


class CacheEventHandover:
    """The queue of cache events from the scheduler loop's thread to the asyncio loop.

    put() costs the scheduler loop's thread an append, and a wake-up of the asyncio loop if no callback is scheduled. Callbacks on
    the asyncio loop deliver the queued events, about CALLBACK_BLOCKS blocks per callback.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[CacheEvents], None]) -> None:
        self._loop, self._deliver = loop, deliver
        self._queue: deque[CacheEvents] = deque()
        self._scheduled = False

    def put(self, events: CacheEvents) -> None:
        """Queues events, which are delivered in the order of the calls. Must always be called on the same thread."""
        self._queue.append(events)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        # Reset before the queue is read, so that put() schedules another callback for an event that the loop below misses.
        self._scheduled = False
        left = CALLBACK_BLOCKS
        while self._queue and left > 0:
            events = self._queue.popleft()
            left -= 1 + _num_blocks(events)
            self._deliver(events)
        if self._queue and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)


def _num_blocks(events: CacheEvents) -> int:
    return len(events.stored) + len(events.removed) + len(events.host) + len(events.storage)


@dataclass(slots=True)
class PublisherCounts:
    """Counters since the start of the worker."""

    stored: int = 0  # blocks that were stored in Redis
    removed: int = 0  # blocks that were removed from Redis
    events: int = 0  # published batches
    generations: int = 0  # begun generations
    republished: int = 0  # blocks that were published again under a new generation
    dropped: int = 0  # changed blocks whose publication failed
    failures: int = 0  # failed attempts to renew the lease or to publish


class IndexPublisher:
    """Publishes the blocks of one worker.

    Load reports read `lease_held`, `generation` and `seq`, the sequence number of the generation's last batch in Redis.
    """

    def __init__(self, url: str, model: str, worker: str, generation: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepares the publisher on the asyncio loop; run() runs it.

        Args:
            url: address of Redis.
            model: name of the model.
            worker: name of the worker.
            generation: random 63-bit number that names the first generation.
            clock: returns the time in seconds.

        Raises:
            ValueError: the URL is invalid.
        """
        self.generation = generation
        self.seq = 0
        self.counts = PublisherCounts()
        self.blocks = CachedBlocks()
        self._worker = worker
        self._client = redis_client(url, TIMEOUT_S)
        self._records = WorkerRecords(self._client, model, worker)
        self._sweeper = Sweeper(self._client, model, worker)
        self._handover = CacheEventHandover(asyncio.get_running_loop(), self._merge)
        self._clock = clock
        self._wake = asyncio.Event()  # ends _wait(), because changes are pending or a new generation must begin
        # False if a new generation must begin: at the start, after a failed batch, a fault of the client library or a loss in
        # Redis, and after the cache was cleared.
        self._registered = False
        self._lease_until: float | None = None  # time at which the lease expires; None before the first lease
        self._run_id = ""  # run id of the Redis server at the start of the generation
        # Earliest times of the next renewal, the next batch and, after a failure, the next attempt.
        self._renew_at = self._publish_at = self._resume_at = clock()
        self._publish_s = PUBLISH_S  # current interval between two batches, in seconds
        self._pause = FIRST_PAUSE_S  # seconds before the next retry
        self._failing = False  # whether the last attempt has failed

    @property
    def lease_held(self) -> bool:
        """Whether this worker has a lease that has not expired."""
        return self._lease_until is not None and self._clock() < self._lease_until

    @property
    def num_swept(self) -> int:
        return self._sweeper.num_swept

    def cached(self, events: CacheEvents) -> None:
        """Queues cache events. Called on the scheduler loop's thread; does not block."""
        self._handover.put(events)

    async def run(self) -> None:
        """Publishes until it is cancelled, and then deletes the lease."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweeper.run())
                tasks.create_task(self._publish_for_ever())
        except Exception:
            logger.critical("publishing of the prefix index has ended with an error", exc_info=True)
            raise
        finally:
            await self._delete_lease()

    def _merge(self, events: CacheEvents) -> None:
        idle = not self.blocks.num_pending
        self.blocks.merge(events)
        if events.cleared:
            self._registered = False
        if events.cleared or idle or self.blocks.num_pending >= BATCH_BLOCKS:
            self._wake.set()

    async def _publish_for_ever(self) -> None:
        while True:
            try:
                await self._run_once()
            except (RedisError, OSError) as error:
                self._failed(error)
            # Any other exception is a fault of the client library. It must not end the renewals, because gateways send no
            # requests to a worker without a lease.
            except Exception as error:
                if not self._failing:
                    logger.exception("publishing of the prefix index failed and is retried")
                self._registered = False
                self._failed(error)
            await self._wait()

    async def _run_once(self) -> None:
        """Renews the lease if it is due. Then begins a generation, if necessary, or publishes a batch, if it is due.

        The renewal comes first, because it detects whether this worker's blocks were swept while the process was suspended. After
        a failure, unused connections are closed, because the address may belong to another Redis server after a failover.
        """
        if self._failing:
            await self._client.connection_pool.disconnect(inuse_connections=False)
        if self._lease_until is not None and self._clock() >= self._renew_at:
            await self._renew()
        if not self._registered:
            await self._begin()
        elif self.blocks.num_pending >= BATCH_BLOCKS or (self.blocks.num_pending and self._clock() >= self._publish_at):
            await self._publish()

    async def _wait(self) -> None:
        now = self._clock()
        if now < self._resume_at:
            await asyncio.sleep(self._resume_at - now)
        elif not self._registered or self.blocks.num_pending >= BATCH_BLOCKS:
            await asyncio.sleep(BATCH_PAUSE_S)
        else:
            until = min(self._publish_at, self._renew_at) if self.blocks.num_pending else self._renew_at
            self._wake.clear()
            try:
                async with asyncio.timeout(max(until - now, 0.0)):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _renew(self) -> None:
        sent_at = self._clock()
        found = await self._records.renew(self.generation)
        self._renew_at = sent_at + RENEW_S
        self._publish_s = min(max(PUBLISH_S, found.num_workers * PUBLISH_S_PER_WORKER), LONGEST_PUBLISH_S)
        if found.lease != str(self.generation).encode():
            self._lease_until = sent_at
            self._report_loss("the lease has expired" if found.lease is None else "the lease names another generation")
            return
        self._lease_until = sent_at + LEASE_TTL_S
        if not self._registered:
            return
        if found.run_id != self._run_id:
            self._report_loss("Redis was restarted")
        elif not found.listed or any(found.num_blocks[tier] != self.blocks.num_published(tier) for tier in BlockTier):
            self._report_loss("blocks are missing")
        else:
            self._succeeded()

    def _report_loss(self, why: str) -> None:
        if self._registered:
            logger.warning("redis has lost this worker's part of the prefix index; all blocks are published again: %s", why)
        self._registered = False

    async def _begin(self) -> None:
        """Begins a new generation. All blocks become pending, because the generation has no blocks in Redis yet."""
        generation = secrets.randbits(63) if self.counts.generations or self._failing else self.generation
        sent_at = self._clock()
        self._run_id = await self._records.register(generation, self.generation)
        self._lease_until, self._renew_at = sent_at + LEASE_TTL_S, sent_at + RENEW_S
        self.generation, self.seq = generation, 0
        self.blocks.restart()
        if self.counts.generations:
            self.counts.republished += self.blocks.num_pending
        self.counts.generations += 1
        self._registered = True
        await self._publish()
        logger.info("this worker's lease is in redis; %d blocks are still to publish", self.blocks.num_pending)

    async def _publish(self) -> None:
        generation, seq = self.generation, self.seq + 1
        moves = self.blocks.take(BATCH_BLOCKS)
        try:
            await self._records.publish(generation, seq, moves)
        except (RedisError, OSError):
            self._registered = False  # the content of Redis is uncertain
            self.counts.dropped += len(moves)
            raise
        self.seq = seq
        self._publish_at = self._clock() + self._publish_s
        removed = sum(move.after is None for move in moves)
        self.counts.stored += len(moves) - removed
        self.counts.removed += removed
        self.counts.events += 1
        self._succeeded()

    def _failed(self, error: Exception) -> None:
        self.counts.failures += 1
        if not self._failing:
            logger.warning("redis is unreachable or refuses commands; the worker serves without it: %s", type(error).__name__)
        self._failing = True
        self._resume_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _succeeded(self) -> None:
        if self._failing:
            logger.info("redis accepts the prefix index again")
        self._failing, self._pause = False, FIRST_PAUSE_S

    async def _delete_lease(self) -> None:
        try:
            async with asyncio.timeout(DELETE_LEASE_S):
                await self._records.delete_lease(self.generation)
        except (RedisError, OSError) as error:
            logger.info("could not delete the lease, which will expire: %s", type(error).__name__)
        await self._client.aclose()
