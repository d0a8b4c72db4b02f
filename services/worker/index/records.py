"""The blocks of this worker by tier, and its records in Redis, whose format is in services/shared/index/prefix_index.py.

CachedBlocks has the blocks and their unpublished changes. WorkerRecords writes blocks, lease, generations and events to Redis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from rootstock_llm.services.shared.index.prefix_index import (
    BELOW_TTL_S,
    EVENTS_KEPT,
    LEASE_TTL_S,
    BlockTier,
    IndexEvent,
    block_key,
    events_key,
    generations_key,
    lease_key,
    own_key,
    owner_field,
    workers_key,
)
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents

PIPELINE_BLOCKS = 250  # largest number of blocks per round trip
BELOW = (BlockTier.HOST, BlockTier.STORAGE)  # tiers below the device


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A change of a block's tier."""

    block: bytes
    before: BlockTier | None  # tier according to Redis; None: Redis does not have the block
    after: BlockTier | None  # present tier; None: the worker has dropped the block


class CachedBlocks:
    """The blocks of one worker by tier, and the changes that are not in Redis yet. Used only on the asyncio loop; without I/O.

    A block has at most one unpublished change, which is dropped if the block returns to its tier in Redis. The number of changes
    is therefore bounded, even if Redis is unreachable for long. Tiers are stored as ints, because the garbage collector does not
    track a dict of bytes to ints.
    """

    def __init__(self) -> None:
        self._cached: dict[bytes, int] = {}  # tier by block
        self._pending: dict[bytes, int | None] = {}  # by changed block: its tier in Redis; None: it is not in Redis
        self._published: Counter[int] = Counter()  # number of published blocks by tier
        self._counts: Counter[int] = Counter()  # number of blocks by tier

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def num_in(self, tier: BlockTier) -> int:
        return self._counts[tier]

    def num_published(self, tier: BlockTier) -> int:
        """Returns the number of this generation's blocks that Redis has in a tier, provided that every write has succeeded."""
        return self._published[tier]

    def in_tier(self, tier: BlockTier = BlockTier.DEVICE) -> frozenset[bytes]:
        return frozenset(block for block, where in self._cached.items() if where == tier)

    def merge(self, events: CacheEvents) -> None:
        """Applies cache events. If `events.cleared` is set, the caller must begin a new generation with restart()."""
        if events.cleared:
            self._cached, self._pending = {}, {}
            self._published, self._counts = Counter(), Counter()
        self._put(events.stored, BlockTier.DEVICE)
        self._put(events.host, BlockTier.HOST)
        self._put(events.storage, BlockTier.STORAGE)
        self._put(events.removed, None)

    def _put(self, blocks: Iterable[bytes], tier: BlockTier | None) -> None:
        after = None if tier is None else int(tier)
        for block in blocks:
            before = self._cached.get(block)
            if before == after:
                continue
            if before is not None:
                self._counts[before] -= 1
            if after is None:
                del self._cached[block]
            else:
                self._cached[block] = after
                self._counts[after] += 1
            if self._pending.setdefault(block, before) == after:
                del self._pending[block]

    def restart(self) -> None:
        """Marks all blocks as pending for a new generation, which has no blocks in Redis yet."""
        self._pending = dict.fromkeys(self._cached)
        self._published = Counter()

    def take(self, limit: int) -> list[BlockMove]:
        """Returns up to `limit` pending changes, oldest first, and counts them as published."""
        pending = islice(self._pending.items(), limit)
        moves = [BlockMove(block, _tier(before), _tier(self._cached.get(block))) for block, before in pending]
        for move in moves:
            del self._pending[move.block]
            if move.before is not None:
                self._published[move.before] -= 1
            if move.after is not None:
                self._published[move.after] += 1
        return moves


def _tier(value: int | None) -> BlockTier | None:
    return None if value is None else BlockTier(value)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The state in Redis that one lease renewal found for this worker."""

    lease: bytes | None  # value of the lease in Redis, a generation; None: the lease has expired
    num_blocks: tuple[int, ...]  # registered blocks by BlockTier
    listed: bool  # whether the worker and its generation are in the sets that the sweeper reads
    num_workers: int  # registered workers of this model
    run_id: str  # run id of the Redis server; changes when the server restarts


class WorkerRecords:
    """This worker's records in Redis.

    Each method takes one or a few round trips, and raises RedisError or OSError if Redis is unreachable, slow or refuses a
    command.

    A block is added to the generation's set `own:` before the worker's field is written to the block's Redis hash. The block is
    removed from the set after the field is deleted. A sweep after a crash therefore finds all blocks in the set.
    """

    def __init__(self, client: Redis, model: str, worker: str) -> None:
        self._client = client
        self._model, self._worker = model, worker

    async def register(self, generation: int, before: int) -> str:
        """Writes the lease of a new generation, which makes all records of older generations invalid.

        Also lists the previous generation `before` for the sweeper again. A sweep may have removed the previous generation
        from the list before its last records were written.

        Returns:
            The run id of the Redis server.
        """
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(lease_key(self._worker), generation, ex=LEASE_TTL_S)
            pipe.sadd(generations_key(self._worker), generation, before)
            pipe.sadd(workers_key(self._model), self._worker)
            pipe.info("server")
            return str((await pipe.execute())[-1]["run_id"])

    async def renew(self, generation: int) -> Renewal:
        """Renews the lease and returns the worker's state in Redis.

        Renews the lease even if its value is another generation; the result has this value. Uses only commands that a full Redis
        accepts.
        """
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.getex(lease_key(self._worker), ex=LEASE_TTL_S)
            for tier in BELOW:
                pipe.expire(own_key(self._worker, generation, tier), BELOW_TTL_S)
            for tier in BlockTier:
                pipe.scard(own_key(self._worker, generation, tier))
            pipe.sismember(generations_key(self._worker), str(generation))
            pipe.sismember(workers_key(self._model), self._worker)
            pipe.scard(workers_key(self._model))
            pipe.info("server")
            lease, _, _, *num_blocks, in_generations, in_workers, num_workers, info = await pipe.execute()
        return Renewal(lease, tuple(num_blocks), bool(in_generations and in_workers), num_workers, info["run_id"])

    async def publish(self, generation: int, seq: int, moves: Sequence[BlockMove]) -> None:
        """Adds the blocks to their new tiers, removes them from their old tiers, and appends the batch to the event stream."""
        for at in range(0, len(moves), PIPELINE_BLOCKS):
            await self._store(generation, moves[at : at + PIPELINE_BLOCKS])
        for at in range(0, len(moves), PIPELINE_BLOCKS):
            await self._remove(generation, moves[at : at + PIPELINE_BLOCKS])
        event = _event(self._worker, generation, seq, moves)
        await self._client.xadd(events_key(self._model), event.fields(), maxlen=EVENTS_KEPT, approximate=True)  # type: ignore[arg-type]

    async def _store(self, generation: int, moves: Sequence[BlockMove]) -> None:
        owner = owner_field(self._worker, generation)
        async with self._client.pipeline(transaction=False) as pipe:
            for tier, blocks in _by_tier((move.after, move.block) for move in moves):
                own = own_key(self._worker, generation, tier)
                pipe.sadd(own, *blocks)
                if tier is not BlockTier.DEVICE:
                    pipe.expire(own, BELOW_TTL_S)
                    continue
                for block in blocks:
                    pipe.execute_command("HSET", block_key(self._model, block), owner, b"")
            await _executed(pipe)

    async def _remove(self, generation: int, moves: Sequence[BlockMove]) -> None:
        owner = owner_field(self._worker, generation)
        async with self._client.pipeline(transaction=False) as pipe:
            for tier, blocks in _by_tier((move.before, move.block) for move in moves):
                for block in blocks if tier is BlockTier.DEVICE else ():
                    pipe.execute_command("HDEL", block_key(self._model, block), owner)
                pipe.srem(own_key(self._worker, generation, tier), *blocks)
            await _executed(pipe)

    async def delete_lease(self, generation: int) -> None:
        """Deletes the lease if it still belongs to this generation."""
        if await self._client.get(lease_key(self._worker)) == str(generation).encode():
            await self._client.delete(lease_key(self._worker))


def _event(worker: str, generation: int, seq: int, moves: Sequence[BlockMove]) -> IndexEvent:
    after: dict[BlockTier | None, list[bytes]] = {tier: [] for tier in (None, *BlockTier)}
    for move in moves:
        after[move.after].append(move.block)
    left = [move.block for move in moves if move.before is BlockTier.DEVICE and move.after in BELOW]
    stored, host, storage = (tuple(after[tier]) for tier in BlockTier)
    return IndexEvent(worker, generation, seq, seq == 1, stored, (*after[None], *left), host, storage)


def _by_tier(placed: Iterable[tuple[BlockTier | None, bytes]]) -> Iterator[tuple[BlockTier, list[bytes]]]:
    blocks: dict[BlockTier, list[bytes]] = {}
    for tier, block in placed:
        if tier is not None:
            blocks.setdefault(tier, []).append(block)
    yield from blocks.items()


async def _executed(pipe: Pipeline) -> None:
    """Executes a pipeline. Skips the round trip if the pipeline is empty."""
    if pipe.command_stack:
        await pipe.execute()
