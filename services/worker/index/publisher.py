"""Renews this worker's lease and publishes its blocks to Redis, outside of the step path (docs/design/fleet.md#the-index).

One asyncio task owns all state except CacheEventHandover. The worker also serves while Redis is unreachable, full or slow.
Meanwhile, changes accumulate; opposite changes of a block cancel out, so that there is at most one change per block. If a write
failed, Redis was restarted or Redis keys are missing, the content of Redis is uncertain: a new generation begins and all blocks
are published again.
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
from rootstock_llm.services.worker.index.records import HeldBlocks, WorkerRecords
from rootstock_llm.services.worker.index.sweeper import Sweeper

logger = logging.getLogger(__name__)

TIMEOUT_S = RENEW_S  # time limit of one Redis command, in seconds
# Seconds between two batches. If BATCH_BLOCKS changes are pending, the next batch is sent earlier.
PUBLISH_S = 0.1
# The time between batches is at least this many seconds times the model's workers, because every gateway reads all batches.
PUBLISH_S_PER_WORKER = 0.0005
LONGEST_PUBLISH_S = 0.5  # upper limit of the time between batches, in seconds
BATCH_BLOCKS = 500  # largest number of changed blocks in a batch
BATCH_PAUSE_S = 0.01  # seconds between two full batches
FIRST_PAUSE_S = 0.1  # seconds before the retry after a failure; doubled for each further failure in a row
LONGEST_PAUSE_S = 2.0  # upper limit of the seconds before a retry
GIVE_UP_S = 1.0  # time limit in seconds of deleting the lease when the worker stops
BLOCKS_A_TURN = 4096  # blocks that one callback of the asyncio loop handles, so that other callbacks are not delayed


class CacheEventHandover:
    """The queue of cache events from the loop's thread to the asyncio loop.

    put() costs the loop's thread only an append. One callback on the asyncio loop handles all queued events, in portions of about
    BLOCKS_A_TURN blocks.
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
        self._scheduled = False  # first, so that events that are queued from now on are handled below or schedule another run
        left = BLOCKS_A_TURN
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
    """Counters since the start."""

    stored: int = 0  # blocks that Redis has recorded
    removed: int = 0  # blocks that Redis has removed
    events: int = 0  # published batches
    generations: int = 0  # begun generations
    republished: int = 0  # blocks that were published again under a new generation
    dropped: int = 0  # changed blocks whose publication failed
    failures: int = 0  # failed calls of _turn()


class IndexPublisher:
    """Publishes the blocks of one worker.

    Load reports read `lease_held`, `generation` and `seq`, the sequence number of the generation's last batch in Redis.
    """

    def __init__(self, url: str, model: str, worker: str, generation: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepares the publisher on the asyncio loop; keep() runs it.

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
        self.blocks = HeldBlocks()
        self._worker = worker
        self._client = redis_client(url, TIMEOUT_S)
        self._records = WorkerRecords(self._client, model, worker)
        self._sweeper = Sweeper(self._client, model, worker)
        self._handover = CacheEventHandover(asyncio.get_running_loop(), self._merge)
        self._clock = clock
        self._news = asyncio.Event()
        self._registered = False  # whether the lease of this generation was written to Redis and no command has failed since
        self._held_until: float | None = None  # end of the lease; None before the first lease
        self._run_id = ""
        self._renew_at = self._publish_at = self._resume_at = clock()
        self._publish_s = PUBLISH_S
        self._pause = FIRST_PAUSE_S
        self._failing = False

    @property
    def lease_held(self) -> bool:
        """Whether the lease has not expired."""
        return self._held_until is not None and self._clock() < self._held_until

    @property
    def num_swept(self) -> int:
        return self._sweeper.num_swept

    def cached(self, events: CacheEvents) -> None:
        """Queues cache events. Called on the loop's thread; returns at once."""
        self._handover.put(events)

    async def keep(self) -> None:
        """Publishes until it is cancelled, and then deletes the lease."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweeper.run())
                tasks.create_task(self._publish_for_ever())
        except Exception:
            logger.critical("publishing of the prefix index has ended with an error", exc_info=True)
            raise
        finally:
            await self._give_up()

    def _merge(self, events: CacheEvents) -> None:
        idle = not self.blocks.num_pending
        self.blocks.merge(events)
        if events.cleared:
            self._registered = False
        if events.cleared or idle or self.blocks.num_pending >= BATCH_BLOCKS:
            self._news.set()

    async def _publish_for_ever(self) -> None:
        while True:
            try:
                await self._turn()
            except (RedisError, OSError) as error:
                self._failed(error)
            except Exception as error:  # a fault of the client library; if the lease expired, gateways would send no requests
                if not self._failing:
                    logger.exception("publishing of the prefix index failed and is retried")
                self._registered = False
                self._failed(error)
            await self._rest()

    async def _turn(self) -> None:
        """Renews the lease if this is due, and then begins a generation or publishes a batch if this is due.

        The renewal comes first, because it detects whether the blocks were swept while this process was suspended. After a
        failure, all connections are replaced, because after a failover the address may belong to another server.
        """
        if self._failing:
            await self._client.connection_pool.disconnect(inuse_connections=False)
        if self._held_until is not None and self._clock() >= self._renew_at:
            await self._renew()
        if not self._registered:
            await self._begin()
        elif self.blocks.num_pending >= BATCH_BLOCKS or (self.blocks.num_pending and self._clock() >= self._publish_at):
            await self._publish()

    async def _rest(self) -> None:
        now = self._clock()
        if now < self._resume_at:
            await asyncio.sleep(self._resume_at - now)
        elif not self._registered or self.blocks.num_pending >= BATCH_BLOCKS:
            await asyncio.sleep(BATCH_PAUSE_S)
        else:
            until = min(self._publish_at, self._renew_at) if self.blocks.num_pending else self._renew_at
            self._news.clear()
            try:
                async with asyncio.timeout(max(until - now, 0.0)):
                    await self._news.wait()
            except TimeoutError:
                return

    async def _renew(self) -> None:
        asked = self._clock()
        found = await self._records.renew(self.generation)
        self._renew_at = asked + RENEW_S
        self._publish_s = min(max(PUBLISH_S, found.num_workers * PUBLISH_S_PER_WORKER), LONGEST_PUBLISH_S)
        if found.lease != str(self.generation).encode():
            self._held_until = asked
            self._lost("the lease has expired" if found.lease is None else "the lease names another generation")
            return
        self._held_until = asked + LEASE_TTL_S
        if not self._registered:
            return
        if found.run_id != self._run_id:
            self._lost("Redis was restarted")
        elif not found.listed or any(found.num_blocks[tier] != self.blocks.num_published(tier) for tier in BlockTier):
            self._lost("blocks are missing")
        else:
            self._succeeded()

    def _lost(self, why: str) -> None:
        if self._registered:
            logger.warning("redis has lost this worker's part of the prefix index; all blocks are published again: %s", why)
        self._registered = False

    async def _begin(self) -> None:
        """Begins a new generation. It has no blocks in Redis yet, so all blocks become pending."""
        generation = secrets.randbits(63) if self.counts.generations or self._failing else self.generation
        asked = self._clock()
        self._run_id = await self._records.register(generation, self.generation)
        self._held_until, self._renew_at = asked + LEASE_TTL_S, asked + RENEW_S
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

    async def _give_up(self) -> None:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await self._records.give_up(self.generation)
        except (RedisError, OSError) as error:
            logger.info("could not delete the lease, which will expire: %s", type(error).__name__)
        await self._client.aclose()
