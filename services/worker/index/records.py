"""This worker's records in Redis (services.shared.index.prefix_index): its lease, its generations, its blocks, its events.

Each method is one or a few round trips and raises RedisError or OSError when Redis is away, slow or refuses. Blocks are
registered before they are written and forgotten after they are removed, so that a crash leaves nothing that a sweep cannot find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from services.shared.index.prefix_index import (
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

PIPELINE_BLOCKS = 250


@dataclass(frozen=True, slots=True)
class Renewal:
    """What Redis has of this worker. lease: its value, None if it is gone. listed: the worker and its generation are where a
    sweep looks for them. num_workers: of the model. run_id: the server's, another one after its restart."""

    lease: bytes | None
    num_blocks: int
    listed: bool
    num_workers: int
    run_id: str


class WorkerRecords:
    def __init__(self, client: Redis, model: str, worker: str) -> None:
        self._client = client
        self._model, self._worker = model, worker

    async def register(self, generation: int, before: int) -> str:
        """The lease under a new generation: all entries of older ones are void. `before` is listed again, lest a sweep has
        missed what was written under it lately. Returns the server's run id."""
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.set(lease_key(self._worker), generation, ex=LEASE_TTL_S)
            pipe.sadd(generations_key(self._worker), generation, before)
            pipe.sadd(workers_key(self._model), self._worker)
            pipe.info("server")
            return str((await pipe.execute())[-1]["run_id"])

    async def renew(self, generation: int) -> Renewal:
        """Prolongs the lease, whosever it is: this also works where Redis is full and refuses writes."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.getex(lease_key(self._worker), ex=LEASE_TTL_S)
            pipe.scard(own_key(self._worker, generation))
            pipe.sismember(generations_key(self._worker), str(generation))
            pipe.sismember(workers_key(self._model), self._worker)
            pipe.scard(workers_key(self._model))
            pipe.info("server")
            lease, num_blocks, in_generations, in_workers, num_workers, info = await pipe.execute()
        return Renewal(lease, num_blocks, bool(in_generations and in_workers), num_workers, info["run_id"])

    async def publish(self, event: IndexEvent) -> None:
        """The blocks, a bounded number at a time, then the event that tells of them."""
        own, owner = own_key(self._worker, event.generation), owner_field(self._worker, event.generation)
        for at in range(0, len(event.stored), PIPELINE_BLOCKS):
            await self._store(own, owner, event.stored[at : at + PIPELINE_BLOCKS])
        for at in range(0, len(event.removed), PIPELINE_BLOCKS):
            await self._remove(own, owner, event.removed[at : at + PIPELINE_BLOCKS])
        await self._client.xadd(events_key(self._model), event.fields(), maxlen=EVENTS_KEPT, approximate=True)  # type: ignore[arg-type]

    async def _store(self, own: str, owner: str, blocks: Sequence[bytes]) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(own, *blocks)
            for block in blocks:
                pipe.execute_command("HSET", block_key(self._model, block), owner, b"")
            await pipe.execute()

    async def _remove(self, own: str, owner: str, blocks: Sequence[bytes]) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            for block in blocks:
                pipe.execute_command("HDEL", block_key(self._model, block), owner)
            pipe.srem(own, *blocks)
            await pipe.execute()

    async def give_up(self, generation: int) -> None:
        """Ends the lease if it is still this generation's."""
        if await self._client.get(lease_key(self._worker)) == str(generation).encode():
            await self._client.delete(lease_key(self._worker))
