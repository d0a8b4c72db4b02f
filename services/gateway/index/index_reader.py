"""What the mirror reads of the prefix index in Redis. Each method is one round trip, and raises RedisError or OSError if Redis
is away, slow or refuses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from services.shared.index.block_hash import HASH_BYTES
from services.shared.index.block_tier import BlockTier
from services.shared.index.prefix_index import IndexEvent, event_from, events_key, lease_key, own_key, workers_key
from services.shared.index.redis_client import redis_client
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
EVENTS_READ = 100
BLOCKS_READ = 1000
START = b"0-0"
_MAX_DIGITS = 20  # of a generation


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of a model's stream, oldest first. last: id of the last entry; bad: entries that were no events; more: there are
    probably further ones."""

    model: str
    events: tuple[IndexEvent, ...]
    last: bytes
    bad: int
    more: bool


class IndexReader:
    def __init__(self, url: str) -> None:
        """Raises ValueError if the URL is none."""
        self._client = redis_client(url, TIMEOUT_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def members(self, models: Iterable[str]) -> tuple[str, set[str]]:
        """The server's run id, which changes when it restarts, and all workers of the models."""
        pipe = self._client.pipeline(transaction=False)
        pipe.info("server")
        for model in models:
            pipe.smembers(workers_key(model))
        info, *members = await pipe.execute()
        return str(info["run_id"]), {name.decode(errors="replace") for names in members for name in names}

    async def leases(self, workers: list[str]) -> list[int | None]:
        if not workers:
            return []
        values = cast(list[bytes | None], await self._client.mget([lease_key(worker) for worker in workers]))
        return [int(value) if value and value.isdigit() and len(value) <= _MAX_DIGITS else None for value in values]

    async def blocks(self, worker: str, generation: int) -> AsyncIterator[tuple[BlockTier, list[bytes]]]:
        """All that the generation holds in one tier throughout, some of them perhaps twice; one round trip each. What moves
        meanwhile may be missing or come in two tiers: events tell of it afterwards."""
        for tier in BlockTier:
            cursor = 0
            while True:
                cursor, found = await self._client.sscan(own_key(worker, generation, tier), cursor, count=BLOCKS_READ)
                yield tier, [block for block in cast(list[bytes], found) if len(block) == HASH_BYTES]
                if not cursor:
                    break

    async def newest(self, model: str) -> bytes:
        """The place in the model's stream after which new events come."""
        entries = cast(list[Any], await self._client.xrevrange(events_key(model), count=1))
        return cast(bytes, entries[0][0]) if entries else START

    async def is_trimmed(self, model: str, after: bytes) -> bool:
        """Whether the stream may have lost entries that came after this one."""
        if after == START:
            return False
        entries = cast(list[Any], await self._client.xrange(events_key(model), count=1))
        return not entries or _order(entries[0][0]) > _order(after)

    async def events(self, after: Mapping[str, bytes], block_ms: int | None) -> list[EventBatch]:
        """Of each model what came after the entry. Waits for the first one up to block_ms; None: not at all."""
        models = {events_key(model).encode(): model for model in after}
        places: dict[Any, Any] = {key: after[model] for key, model in models.items()}
        reply = cast(list[Any], await self._client.xread(places, count=EVENTS_READ, block=block_ms))
        return [_batch(models[key], places[key], entries) for key, entries in reply]


def _batch(model: str, after: bytes, entries: list[tuple[bytes, dict[bytes, bytes] | None]]) -> EventBatch:
    """entries: none at all if they were trimmed while they were waited for."""
    events = []
    for entry_id, values in entries:
        try:
            events.append(event_from(values or {}))
        except ValueError as error:
            logger.warning("skipped an entry of the stream: %s", error, extra=fields(model=model, entry=entry_id.decode()))
    last = entries[-1][0] if entries else after
    return EventBatch(model, tuple(events), last, len(entries) - len(events), len(entries) >= EVENTS_READ)


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)
