"""Reads the prefix index in Redis for the mirror.

Each method is one round trip, except blocks(). Each raises RedisError or OSError if Redis is unreachable, slow or refuses a call.
"""

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

TIMEOUT_S = 2.0  # time limit of a call
EVENTS_READ = 100  # most entries per model and call
BLOCKS_READ = 1000  # approximate number of blocks per call
START = b"0-0"  # id before the first entry of a stream
_MAX_DIGITS = 20  # longest generation that is accepted


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of a model's stream."""

    model: str
    events: tuple[IndexEvent, ...]  # the oldest first
    last: bytes  # id of the last entry
    bad: int  # entries that could not be parsed
    more: bool  # the stream probably has more entries


class IndexReader:
    """A client of the Redis with the prefix index."""

    def __init__(self, url: str) -> None:
        """Makes the client. Raises ValueError if the URL is invalid."""
        self._client = redis_client(url, TIMEOUT_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def members(self, models: Iterable[str]) -> tuple[str, set[str]]:
        """Returns the server's run id, which changes at its restart, and the registered workers of the models."""
        pipe = self._client.pipeline(transaction=False)
        pipe.info("server")
        for model in models:
            pipe.smembers(workers_key(model))
        info, *members = await pipe.execute()
        return str(info["run_id"]), {name.decode(errors="replace") for names in members for name in names}

    async def leases(self, workers: list[str]) -> list[int | None]:
        """Returns the generation in each worker's lease, or None for a worker without a lease."""
        if not workers:
            return []
        values = cast(list[bytes | None], await self._client.mget([lease_key(worker) for worker in workers]))
        return [int(value) if value and value.isdigit() and len(value) <= _MAX_DIGITS else None for value in values]

    async def blocks(self, worker: str, generation: int) -> AsyncIterator[tuple[BlockTier, list[bytes]]]:
        """Yields the blocks of a generation by tier, one round trip per item.

        A block may be yielded twice. A block that moves during the scan may be missing or appear in two tiers; later events
        correct that.
        """
        for tier in BlockTier:
            cursor = 0
            while True:
                cursor, found = await self._client.sscan(own_key(worker, generation, tier), cursor, count=BLOCKS_READ)
                yield tier, [block for block in cast(list[bytes], found) if len(block) == HASH_BYTES]
                if not cursor:
                    break

    async def newest(self, model: str) -> bytes:
        """Returns the id of the newest entry in the model's stream."""
        entries = cast(list[Any], await self._client.xrevrange(events_key(model), count=1))
        return cast(bytes, entries[0][0]) if entries else START

    async def is_trimmed(self, model: str, after: bytes) -> bool:
        """Returns whether the entry `after` is trimmed from the stream, so that entries after it may be lost too."""
        if after == START:
            return False
        entries = cast(list[Any], await self._client.xrange(events_key(model), count=1))
        return not entries or _order(entries[0][0]) > _order(after)

    async def events(self, after: Mapping[str, bytes], block_ms: int | None) -> list[EventBatch]:
        """Returns the new events of each model.

        Args:
            after: Id of the last read entry of each model.
            block_ms: Longest wait for an event, in milliseconds; None: no wait.
        """
        models = {events_key(model).encode(): model for model in after}
        places: dict[Any, Any] = {key: after[model] for key, model in models.items()}
        reply = cast(list[Any], await self._client.xread(places, count=EVENTS_READ, block=block_ms))
        return [_batch(models[key], places[key], entries) for key, entries in reply]


def _batch(model: str, after: bytes, entries: list[tuple[bytes, dict[bytes, bytes] | None]]) -> EventBatch:
    """Parses entries of a stream, which are empty if they were trimmed during the wait."""
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
