"""Copies the prefix index from Redis into the gateway's PrefixIndex (docs/design/fleet.md#the-index).

One task makes the copy, and requests never wait for it. Only this task adds and removes confirmed blocks. Routing
adds speculative blocks, and a second task frees the blocks of retired owners. The first task repeats three steps:

1. read the leases, once in POLL_S;
2. read the blocks of one new generation;
3. read the next events.

The position in the event stream is read before the blocks of a generation, and workers write blocks before their events. So the
events after that position include all changes that the reading of the blocks may have missed.

While Redis is unreachable, the copy stays unchanged and leases are unknown. When Redis responds again, workers need up to
LEASE_TTL_S to renew their leases. Until then, a missing lease does not retire an owner.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from redis.exceptions import RedisError

from rootstock_llm.services.gateway.routing.prefix_index import Applied, MirroredOwners, PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import (
    HASH_BYTES,
    LEASE_TTL_S,
    BlockTier,
    IndexEvent,
    event_from,
    events_key,
    lease_key,
    own_key,
    workers_key,
)
from rootstock_llm.services.shared.index.redis_client import redis_client
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0  # time limit of a call of Redis in seconds
EVENTS_READ = 100  # largest number of entries per model and call
BLOCKS_READ = 1000  # approximate number of blocks per call
START = b"0-0"  # id before the first entry of a stream
_MAX_DIGITS = 20  # largest number of digits of a generation; longer values count as no lease
MAX_GONE = 4096  # largest number of stored workers without a lease; beyond it, the worker lost first is dropped
POLL_S = 1.0  # seconds between two readings of the leases
STALE_S = POLL_S + 2 * TIMEOUT_S  # age in seconds of the last reading at which leases count as unknown
BLOCK_MS = 200  # longest wait for events in milliseconds
FIRST_PAUSE_S = 0.1  # pause in seconds after a failure; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 2.0
BLOCKS_PER_TURN = 2000  # number of blocks written to the index before the event loop may run other tasks
SWEEP_BLOCKS = 1000  # blocks of one sweep
SWEEP_PAUSE_S = 0.005
SWEEP_IDLE_S = 0.5  # pause in seconds after a sweep that frees no blocks
Entry = tuple[bytes, dict[bytes, bytes] | None]  # id of a stream entry, and its fields or None if it was trimmed


class IndexReader:
    """A client of the Redis with the prefix index.

    Each method except blocks() is one round trip. Each method raises RedisError or OSError if Redis is unreachable, is slow or
    refuses a call.
    """

    def __init__(self, url: str) -> None:
        """Makes the client. Raises ValueError if the URL is invalid."""
        self._client = redis_client(url, TIMEOUT_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def members(self, models: Iterable[str]) -> tuple[str, set[str]]:
        """Returns (run id of the server, registered workers of the models). The run id changes when the server restarts."""
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

        A block may be yielded twice. A block that moves to another tier during the scan may be missing or appear in both tiers.
        Later events correct this.
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
        """Returns whether the entry `after` was trimmed from the stream. Unread entries after it may then be lost."""
        if after == START:
            return False
        entries = cast(list[Any], await self._client.xrange(events_key(model), count=1))
        return not entries or _order(entries[0][0]) > _order(after)

    async def entries(self, after: Mapping[str, bytes], block_ms: int | None) -> dict[str, list[Entry]]:
        """Returns the new entries in the streams of models, the oldest first, at most EVENTS_READ of each model.

        Args:
            after: Id of the last read entry of each model.
            block_ms: Longest wait for an entry, in milliseconds; None: no wait.
        """
        models = {events_key(model).encode(): model for model in after}
        streams: dict[Any, Any] = {key: after[model] for key, model in models.items()}
        reply = cast(list[Any], await self._client.xread(streams, count=EVENTS_READ, block=block_ms))
        return {models[key]: entries for key, entries in reply}


class LeaseTable:
    """The leases of all workers, as last read. Only IndexMirror writes them. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}  # worker → generation of its lease
        self._ended: dict[str, int] = {}  # workers without a lease → generation of their last lease; in order of loss
        self._back_at = 0.0  # time at which Redis last became reachable

    def note_recovery(self, now: float) -> None:
        """Records that Redis has become reachable. Leases may be missing until workers have renewed them."""
        self._back_at = now

    def has_settled(self, now: float) -> bool:
        """Returns whether all live workers have had time to renew their leases since Redis became reachable.

        Before that, a missing lease does not mean that its worker has ended.
        """
        return now - self._back_at >= LEASE_TTL_S

    def update(self, worker: str, generation: int | None) -> bool:
        """Sets the generation of a worker's lease, or None if the worker has no lease. Returns whether the value has changed."""
        before = self.current.get(worker)
        if before == generation:
            return False
        if generation is not None:
            self.current[worker] = generation
            self._ended.pop(worker, None)
            return True
        self._ended[worker] = self.current.pop(worker)
        while len(self._ended) > MAX_GONE:
            del self._ended[next(iter(self._ended))]
        return True

    def alive(self, worker: str, generation: int, now: float) -> bool | None:
        """Returns whether a generation of a worker has its lease.

        Args:
            generation: The worker's generation; 0: any generation.

        Returns:
            None if this is unknown: has_settled() is False, or the generation has had no lease yet and may get one.
        """
        current = self.current.get(worker)
        if current is not None:
            return True if generation in (0, current) else None
        gone = self._ended.get(worker)
        if gone is None or not self.has_settled(now):
            return None
        return False if generation in (0, gone) else None


@dataclass(slots=True)
class MirrorCounts:
    """Counts since the start of the gateway."""

    events: int = 0  # valid events
    bad_events: int = 0  # entries that could not be parsed
    loads: int = 0  # readings of all blocks of a generation
    gaps: int = 0  # times that events were missed; the blocks of one worker, or of all workers, are then read
    retired: int = 0  # owners whose lease has ended or changed


class IndexMirror:
    """The copy of the prefix index. It belongs to the event loop."""

    def __init__(
        self, url: str, index: PrefixIndex, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Makes the mirror.

        Args:
            changed: Called when `available`, a lease or the number of an owner has changed. Must not block.

        Raises:
            ValueError: The URL is invalid.
        """
        self.counts = MirrorCounts()
        self.available = False  # Redis responds
        self._reader = IndexReader(url)
        self._index, self._changed, self._clock = index, changed, clock
        self._leases = LeaseTable()
        self._owners = MirroredOwners(index)
        self._cursors: dict[str, bytes | None] = {}  # model → id of the last read entry, or None before _poll() has set it
        self._to_load: dict[str, int] = {}  # worker → generation whose blocks must be read
        self._to_verify: set[str] = set()  # workers whose blocks must be read, because Redis was restarted
        self._run_id: str | None = None  # run id of the Redis server, or None before the first reading
        self._polled_at = self._caught_up_at = clock()  # last reading of the leases; last complete copy
        self._pause = FIRST_PAUSE_S
        self._loss_logged = False  # the current outage of Redis has been logged

    # For routing

    @property
    def leases(self) -> Mapping[str, int]:
        """Worker → generation of its lease, as last read."""
        return MappingProxyType(self._leases.current)

    @property
    def lag_s(self) -> float:
        """Seconds since the copy last had all events of Redis."""
        return self._clock() - self._caught_up_at

    @property
    def num_owners(self) -> int:
        return len(self._owners.generations())

    def lease_alive(self, worker: str, generation_hint: int = 0) -> bool | None:
        """Returns whether a worker has its lease.

        Args:
            generation_hint: Index generation that the worker reports; 0: any generation.

        Returns:
            None if this is unknown: Redis is unreachable or has just become reachable, or the generation has had no lease yet.
        """
        now = self._clock()
        if not self.available or now - self._polled_at > STALE_S:
            return None
        return self._leases.alive(worker, generation_hint, now)

    def owner_of(self, worker: str) -> int:
        """Returns the owner number of a worker's mirrored generation; -1 if no generation is mirrored."""
        return self._owners.number(worker)

    def watch_model(self, model: str) -> None:
        """Adds a model to the mirrored models. Idempotent."""
        self._cursors.setdefault(model, None)

    async def run(self) -> None:
        """Runs the mirror until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep())
                tasks.create_task(self._keep_following())
        finally:
            await self._reader.close()

    # The task

    async def _sweep(self) -> None:
        """Frees the blocks of retired owners, SWEEP_BLOCKS at a time."""
        while True:
            swept = self._index.sweep(SWEEP_BLOCKS)
            await asyncio.sleep(SWEEP_PAUSE_S if swept else SWEEP_IDLE_S)

    async def _keep_following(self) -> None:
        while True:
            try:
                await self._follow()
            except (RedisError, OSError) as error:
                self._on_failure(error)
            except Exception as error:  # invalid data in Redis must not end the gateway
                logger.exception("the prefix index could not be read")
                self._on_failure(error)
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    async def _follow(self) -> None:
        """Repeats the three steps until Redis fails."""
        await self._poll()
        while True:
            if self._clock() - self._polled_at >= POLL_S or None in self._cursors.values():
                await self._poll()
            if self._to_load:
                await self._load(*next(iter(self._to_load.items())))
            await self._read(None if self._to_load else BLOCK_MS)

    def _on_failure(self, error: Exception) -> None:
        if self.available or not self._loss_logged:
            logger.warning("redis is unreachable; routing continues with the last copy of the prefix index: %s", error)
        was, self.available, self._loss_logged = self.available, False, True
        if was:
            self._changed()

    def _responded(self) -> None:
        self._polled_at, self._pause = self._clock(), FIRST_PAUSE_S
        if not self.available:
            logger.info("redis responds; the prefix index is mirrored")
            self.available = True
            self._changed()

    # Leases

    async def _poll(self) -> None:
        run_id, workers = await self._reader.members(self._cursors)
        if not self.available:
            self._leases.note_recovery(self._clock())
        self._same_server(run_id)
        for model in [model for model, cursor in self._cursors.items() if cursor is None]:
            self._cursors[model] = await self._reader.newest(model)
        await self._read_leases(workers | self._owners.generations().keys() | self._leases.current.keys())
        self._responded()

    def _same_server(self, run_id: str) -> None:
        """Restarts the mirroring if the run id has changed. The server was then replaced or restarted, and may have lost data."""
        if self._run_id not in (None, run_id):
            logger.warning("redis was restarted; reading the whole prefix index again")
            self._leases.note_recovery(self._clock())
            self._cursors = dict.fromkeys(self._cursors)
            self._to_load.clear()
            self._to_verify = set(self._owners.generations())
        self._run_id = run_id

    async def _read_leases(self, workers: Iterable[str]) -> None:
        names = sorted(workers)
        leases = await self._reader.leases(names)
        changes = [self._apply_lease(worker, lease) for worker, lease in zip(names, leases, strict=True)]
        if any(changes):
            self._changed()

    def _apply_lease(self, worker: str, lease: int | None) -> bool:
        """Applies the last read lease of a worker: retires the worker's owner, or plans to read the worker's blocks.

        Returns:
            Whether the lease or the mirrored generation has changed.
        """
        changed = self._leases.update(worker, lease)
        if lease is None:
            if not self._leases.has_settled(self._clock()):
                return changed
            self._to_load.pop(worker, None)
            return self._retire(worker) or changed
        must_verify = worker in self._to_verify
        self._to_verify.discard(worker)
        if self._owners.generation(worker) == lease:
            if must_verify:
                self._to_load[worker] = lease
            return changed
        self._to_load[worker] = lease
        return self._retire(worker) or changed

    def _retire(self, worker: str) -> bool:
        if self._owners.generation(worker) is None:
            return False
        self._owners.retire(worker)
        self.counts.retired += 1
        return True

    # Blocks

    async def _load(self, worker: str, generation: int) -> None:
        """Reads the blocks of a generation. The worker stays in `_to_load` until all blocks are read."""
        number = self._owners.adopt(worker, generation, None)
        self.counts.loads += 1
        self._changed()
        async for tier, blocks in self._reader.blocks(worker, generation):
            self._index.stored(number, blocks, tier)
            await asyncio.sleep(0)
        self._to_load.pop(worker, None)

    # Events

    async def _read(self, block_ms: int | None) -> None:
        last_read = {model: cursor for model, cursor in self._cursors.items() if cursor is not None}
        if not last_read:
            await asyncio.sleep(BLOCK_MS / 1000)
        entries = await self._reader.entries(last_read, block_ms) if last_read else {}
        for model, new in entries.items():
            await self._check_trim(model, last_read[model])
            await self._apply_entries(model, new)
        has_more = any(len(new) >= EVENTS_READ for new in entries.values())
        if not self._to_load and not has_more:
            self._caught_up_at = self._clock()

    async def _check_trim(self, model: str, after: bytes) -> None:
        """Plans to read all blocks again if the stream was trimmed beyond the last read entry, because events may be lost."""
        if await self._reader.is_trimmed(model, after):
            logger.warning("index events were trimmed before they were read; reading all blocks again", extra=fields(model=model))
            self.counts.gaps += 1
            mirrored = self._owners.generations().items()
            self._to_load |= {worker: number for worker, number in mirrored if self._leases.current.get(worker) == number}

    async def _apply_entries(self, model: str, entries: list[Entry]) -> None:
        """Applies the events of new entries of a model's stream."""
        events = self._parse(model, entries)
        foreign = {event.worker for event in events if self._owners.generation(event.worker) != event.generation}
        await self._read_leases(foreign)
        await self._apply(events)
        if entries:
            self._cursors[model] = entries[-1][0]

    def _parse(self, model: str, entries: list[Entry]) -> list[IndexEvent]:
        """Returns the events of valid entries, and counts and logs invalid entries."""
        events = []
        for entry_id, values in entries:
            try:
                events.append(event_from(values or {}))
            except ValueError as error:
                self.counts.bad_events += 1
                logger.warning("skipped an invalid index event: %s", error, extra=fields(model=model, entry=entry_id.decode()))
        return events

    async def _apply(self, events: Iterable[IndexEvent]) -> None:
        written = 0
        for event in events:
            self._apply_one(event)
            written += event.num_blocks
            if written >= BLOCKS_PER_TURN:
                written = 0
                await asyncio.sleep(0)

    def _apply_one(self, event: IndexEvent) -> None:
        """Applies an event.

        A worker writes the lease of a generation before the generation's first event. So an event of a generation without a lease
        is outdated.
        """
        self.counts.events += 1
        applied = self._owners.apply(event)
        if applied is Applied.FOREIGN and self._leases.current.get(event.worker) == event.generation:
            if event.seq == 1:
                self._owners.adopt(event.worker, event.generation, 0)
                self._owners.apply(event)
                self._to_load.pop(event.worker, None)
                self._changed()
            else:
                self._to_load[event.worker] = event.generation
        elif applied is Applied.GAP:
            logger.warning("index events are missing; reading the worker's blocks again", extra=fields(worker=event.worker))
            self.counts.gaps += 1
            self._to_load[event.worker] = event.generation


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)
