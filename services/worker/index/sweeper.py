"""Removes the records of dead generations from Redis, a few blocks at a time (docs/design/fleet.md#the-index).

The sets `own:` list the blocks of a generation. Each worker sweeps its own records and the records of a few random workers of its
model. It also sweeps a few workers of one other model, because that model may have no live worker.

The records of a generation do not have its model. If a worker has changed its model, the sweep therefore removes the blocks of a
dead generation under all models of the worker, and then removes the worker from the other models.

A generation is dead if the worker's lease names another generation, or if the lease has been missing for LATE_S. If the lease
has been missing for a shorter time, the worker may still renew it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from itertools import product
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rootstock_llm.services.shared.index.prefix_index import (
    LEASE_TTL_S,
    MODELS_KEY,
    BlockTier,
    block_key,
    events_key,
    generations_key,
    lease_key,
    own_key,
    owner_field,
    workers_key,
)
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

EVERY_S = 30.0  # seconds between two rounds
LATE_S = 2.5 * LEASE_TTL_S  # seconds for which a lease must be missing before the worker counts as dead
RANDOM_WORKERS = 8  # random workers per model and round
BATCH_BLOCKS = 250  # largest number of blocks per round trip
BATCH_PAUSE_S = 0.02  # seconds between two batches, which limits the load on Redis
BELOW = (BlockTier.HOST, BlockTier.STORAGE)


class Sweeper:
    """The sweeper of one worker. Several workers may sweep the same generation at the same time."""

    def __init__(self, client: Redis, model: str, worker: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_swept = 0
        self._client = client
        self._model, self._worker = model, worker
        self._clock = clock
        self._gone: dict[tuple[str, str], float] = {}  # by (model, worker): when the worker's lease was first found missing

    async def run(self) -> None:
        """Sweeps until it is cancelled."""
        while True:
            try:
                await self.sweep()
            except (RedisError, OSError) as error:
                logger.debug("the sweep failed and is retried in the next round: %s", type(error).__name__)
            except Exception:  # must not end the publisher, which renews the lease
                logger.exception("the sweep failed and is retried in the next round")
            await asyncio.sleep(EVERY_S)

    async def sweep(self) -> None:
        """Runs one round. Raises RedisError or OSError if Redis is unreachable or refuses a command."""
        await self._sweep_worker(self._model, self._worker)
        await self._leave_models()
        other = next((name for name in await self._random(MODELS_KEY, 2) if name != self._model), None)
        seen = set(self._gone)
        for model in (self._model, other):
            if model is not None:
                seen.update((model, worker) for worker in await self._random(workers_key(model), RANDOM_WORKERS))
        for model, worker in sorted(seen - {(self._model, self._worker)}):
            await self._sweep_worker(model, worker)
        if other is not None:
            await self._forget_model(other)
        # The last command, because a full Redis refuses it. The removals above also work on a full Redis.
        await self._client.sadd(MODELS_KEY, self._model)

    async def _sweep_worker(self, model: str, worker: str) -> None:
        lease, generations = await self._state(worker)
        if lease is None:
            since = self._gone.setdefault((model, worker), self._clock())
            if worker == self._worker or self._clock() - since < LATE_S:
                return
        self._gone.pop((model, worker), None)
        if dead := sorted(generations - {lease}):
            models = {model, *await self._models_of(worker)}
            for generation in dead:
                await self._sweep_generation(models, worker, int(generation))
        if lease is None:
            await self._forget(model, worker)

    async def _state(self, worker: str) -> tuple[bytes | None, set[bytes]]:
        """Returns a worker's lease and generations.

        Reads both in one transaction. Otherwise, a generation that begins between the two reads would seem dead.
        """
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.get(lease_key(worker))
            pipe.smembers(generations_key(worker))
            lease, generations = await pipe.execute()
        return lease, {generation for generation in generations if generation.isdigit()}

    async def _models_of(self, worker: str) -> list[str]:
        """Returns the models with this worker. A worker that has changed its model has several."""
        models = [name.decode(errors="replace") for name in cast(set[bytes], await self._client.smembers(MODELS_KEY))]
        async with self._client.pipeline(transaction=False) as pipe:
            for model in models:
                pipe.sismember(workers_key(model), worker)
            return [model for model, has_worker in zip(models, await pipe.execute(), strict=True) if has_worker]

    async def _leave_models(self) -> None:
        """Removes this worker from models that it had before. Their generations of this worker are swept already."""
        for model in await self._models_of(self._worker):
            if model != self._model:
                await self._client.srem(workers_key(model), self._worker)
                await self._forget_model(model)

    async def _sweep_generation(self, models: Collection[str], worker: str, generation: int) -> None:
        """Removes the records of one generation of a worker that has had these models.

        A block is removed from the set `own:` last, so that the next sweep finds the remaining blocks after an interruption.
        """
        own, owner = own_key(worker, generation), owner_field(worker, generation)
        swept = 0
        while blocks := await self._random_blocks(own):
            async with self._client.pipeline(transaction=False) as pipe:
                for model, block in product(models, blocks):
                    pipe.execute_command("HDEL", block_key(model, block), owner)
                pipe.srem(own, *blocks)
                await pipe.execute()
            swept += len(blocks)
            self.num_swept += len(blocks)
            await asyncio.sleep(BATCH_PAUSE_S)
        await self._client.unlink(*(own_key(worker, generation, tier) for tier in BELOW))
        await self._client.srem(generations_key(worker), generation)
        logger.info("swept a dead generation", extra=fields(worker=worker, blocks=swept))

    async def _random_blocks(self, key: str) -> list[bytes]:
        return cast(list[bytes], await self._client.srandmember(key, BATCH_BLOCKS) or [])

    async def _random(self, key: str, count: int) -> list[str]:
        """Returns up to `count` random members of a set of names."""
        found = cast(list[bytes], await self._client.srandmember(key, count) or [])
        return [name.decode(errors="replace") for name in found]

    async def _forget(self, model: str, worker: str) -> None:
        """Removes a worker without lease and generations from its model. A worker that returns adds itself again."""
        lease, generations = await self._state(worker)
        if lease is None and not generations:
            await self._client.srem(workers_key(model), worker)

    async def _forget_model(self, model: str) -> None:
        """Removes a model without workers. The next worker of the model adds it again."""
        if not await self._client.exists(workers_key(model)):
            await self._client.unlink(events_key(model))
            await self._client.srem(MODELS_KEY, model)
