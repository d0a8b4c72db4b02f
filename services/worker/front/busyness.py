"""How busy the worker is, told to every front end: when it has changed, and once a second in any case.

Runs on the asyncio loop, so that front ends hear of a worker whose step takes long, and for how long it has taken. `turned` is
called on the scheduler's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import Protocol

from rootstock.v1 import worker_pb2
from services.worker.core.contracts.counters import StepStats
from services.worker.front.outbox import PeerStream, StreamOutbox
from services.worker.loop.pulse import Pulse
from services.worker.loop.step_limit import StepLimit

GAP_S = 0.1
BEAT_S = 1.0


class IndexState(Protocol):
    """What the prefix index knows of this worker. Read on the asyncio loop."""

    @property
    def lease_held(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def seq(self) -> int:
        """Of the last batch of that generation that Redis has; 0: none."""
        ...


@dataclass(frozen=True, slots=True)
class NoIndex:
    """Of a worker without Redis."""

    generation: int
    lease_held: bool = False
    seq: int = 0


class LoadReport:
    """Sends each gateway stream the load: when it has changed, at most every gap_s seconds, and at least every beat_s seconds.

    A change of `paused` or `refuses_new` is sent at once. `stats` are the scheduler's latest, None before its first turn.
    `page_size` is in tokens.
    """

    def __init__(
        self,
        outbox: StreamOutbox,
        page_size: int,
        index: IndexState,
        pulse: Pulse,
        limit: StepLimit,
        gap_s: float = GAP_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self._outbox = outbox
        self._page_size = page_size
        self._index = index
        self._pulse, self._limit = pulse, limit
        self._gap_s, self._beat_s = gap_s, beat_s
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._signalled = False
        self.stats: StepStats | None = None

    @property
    def num_requests(self) -> int:
        """Running and waiting, as of the scheduler's latest turn. From any thread."""
        return 0 if self.stats is None else self.stats.num_running + self.stats.num_waiting

    @property
    def num_rooms(self) -> int:
        """That others may still read, as of the same turn. From any thread."""
        return 0 if self.stats is None else self.stats.num_rooms

    def turned(self, stats: StepStats) -> None:
        """On the scheduler's thread. Wakes the asyncio loop once for all turns between two tellings."""
        before = (False, False) if self.stats is None else (self.stats.paused, self.stats.refuses_new)
        self.stats = stats
        if (stats.paused, stats.refuses_new) != before:
            self._loop.call_soon_threadsafe(self.tell)
        elif not self._signalled:
            self._signalled = True
            self._loop.call_soon_threadsafe(self._changed.set)

    def changed(self) -> None:
        """Something other than the stats may have changed."""
        self._changed.set()

    def greet(self, stream: PeerStream) -> None:
        """A new stream's first load."""
        self._put(stream, self._unaged(stream), self._loop.time())

    def tell(self) -> float:
        """Tells every stream whose load has changed or is a beat old. Returns seconds until the next is that old."""
        self._changed.clear()
        self._signalled = False  # before stats are read, so that no later ones are missed
        now, due_s = self._loop.time(), self._beat_s
        for stream in self._outbox.streams:
            load = self._unaged(stream)
            if load != stream.told or now - stream.told_at >= self._beat_s:
                self._put(stream, load, now)
            due_s = min(due_s, stream.told_at + self._beat_s - now)
        return due_s

    async def keep(self) -> None:
        """For ever."""
        while True:
            due_s = self.tell()
            await asyncio.sleep(self._gap_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due_s - self._gap_s, 0.0)):
                    await self._changed.wait()

    def _put(self, stream: PeerStream, load: worker_pb2.WorkerLoad, now: float) -> None:
        """With the figures that change by themselves, or with every step: they are no news."""
        aged = worker_pb2.WorkerLoad()
        aged.CopyFrom(load)
        aged.step_age_ms, aged.step_limit_ms = math.ceil(self._pulse.age_s * 1e3), math.ceil(self._limit.seconds * 1e3)
        stats = self.stats
        if stats is not None:
            aged.running_tokens = stats.pages_used * self._page_size
            aged.prompt_tokens, aged.cached_prompt_tokens = stats.prompt_tokens_total, stats.cached_tokens_total
            if stats.host_saves is not None:
                aged.host_saves = stats.host_saves
            if stats.storage_saves is not None:
                aged.storage_saves = stats.storage_saves
            aged.generated_tokens, aged.retractions = stats.generated_tokens_total, stats.retractions_total
        stream.put_load(aged, load, now)

    def _unaged(self, stream: PeerStream) -> worker_pb2.WorkerLoad:
        index = self._index
        load = worker_pb2.WorkerLoad(
            num_open=self._outbox.num_open,
            num_open_here=len(stream.open),
            draining=bool(self._outbox.closed),
            lease_held=index.lease_held,
            index_generation=index.generation,
            index_seq=index.seq,
        )
        stats = self.stats
        if stats is not None:
            load.num_running, load.num_waiting = stats.num_running, stats.num_waiting
            load.used_tokens = stats.pages_used * self._page_size + stats.waiting_tokens
            load.cached_tokens = stats.pages_evictable * self._page_size
            load.paused, load.pulls_lose = stats.paused, stats.pulls_lose
            load.refuses_new = stats.refuses_new
        return load
