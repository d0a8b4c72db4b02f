"""This worker's records in Redis: its lease, generations, blocks and events (services.shared.index.prefix_index).

Each method takes one or a few round trips, and raises RedisError or OSError if Redis is away, slow or refuses. A block's name is
recorded before the block is written and removed after it, so that a sweep finds everything after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from services.shared.index.block_tier import BlockTier
from services.shared.index.prefix_index import (
    BELOW_TTL_S,
    EVENTS_KEPT,
    LEASE_TTL_S,
    IndexEvent,
    block_key,
    events_key,
    generations_key,
    lease_key,
    own_key,
    owner_field,
    workers_key,
)
from services.worker.index.held_blocks import BlockMove

PIPELINE_BLOCKS = 250  # blocks per round trip
BELOW = (BlockTier.HOST, BlockTier.STORAGE)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The state in Redis that one lease renewal found for this worker."""

    lease: bytes | None  # value of the lease key, or None if it has expired
    num_blocks: tuple[int, ...]  # registered blocks by BlockTier
    listed: bool  # the worker and its generation are in the sets that the sweeper reads
    num_workers: int  # registered workers of this model
    run_id: str  # run id of the Redis server; changes when the server restarts


class WorkerRecords:
    def __init__(self, client: Redis, model: str, worker: str) -> None:
        self._client = client
        self._model, self._worker = model, worker

    async def register(self, generation: int, before: int) -> str:
        """Writes the lease of a new generation, which makes all records of older generations void.

        `before` is the previous generation. It is listed again, because a sweep may have missed its latest records.

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
        """Prolongs the lease and returns the worker's state.

        It prolongs the lease of any generation, and works on a full Redis that refuses writes.
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
        """Writes the blocks at their new tiers, removes them from their old ones, and then adds the event of the batch."""
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

    async def give_up(self, generation: int) -> None:
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
    """Executes a pipeline. An empty one takes no round trip."""
    if pipe.command_stack:
        await pipe.execute()
