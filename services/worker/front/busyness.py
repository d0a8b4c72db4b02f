"""Load reports to the gateways: after each change, and at least once per second.

They run on the asyncio loop, so that gateways also learn of a step that takes long, and for how long it has run. Only turned() is
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
from services.worker.loop.progress import Pulse, StepLimit

GAP_S = 0.1  # least seconds between two reports, except for urgent changes
BEAT_S = 1.0  # largest seconds between two reports


class IndexState(Protocol):
    """The state of this worker in the prefix index. Read on the asyncio loop."""

    @property
    def lease_held(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def seq(self) -> int:
        """Number of the last batch of this generation that Redis has; 0 for no batch."""
        ...


@dataclass(frozen=True, slots=True)
class NoIndex:
    """The index state of a worker without Redis."""

    generation: int
    lease_held: bool = False
    seq: int = 0


class LoadReport:
    """Sends the load to each gateway stream: after a change, but at most every gap_s seconds, and at least every beat_s seconds.

    A change of `paused` or `refuses_new` is sent at once.
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
        """Prepares the reports; keep() sends them.

        Args:
            outbox: the gateway streams.
            page_size: tokens of a page.
            index: state of this worker in the prefix index.
            pulse: the loop's signs of life.
            limit: time limit of a step.
            gap_s: least seconds between two reports.
            beat_s: largest seconds between two reports.
        """
        self._outbox = outbox
        self._page_size = page_size
        self._index = index
        self._pulse, self._limit = pulse, limit
        self._gap_s, self._beat_s = gap_s, beat_s
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._signalled = False
        self.stats: StepStats | None = None  # stats of the scheduler's latest turn; unset before the first one

    @property
    def num_requests(self) -> int:
        """Number of running and waiting requests at the scheduler's latest turn. Readable from any thread."""
        return 0 if self.stats is None else self.stats.num_running + self.stats.num_waiting

    @property
    def num_rooms(self) -> int:
        """Number of open KV reservations at the scheduler's latest turn. Readable from any thread."""
        return 0 if self.stats is None else self.stats.num_rooms

    def turned(self, stats: StepStats) -> None:
        """Takes the stats of a turn on the scheduler's thread. Wakes the asyncio loop once for all turns between two reports."""
        before = (False, False) if self.stats is None else (self.stats.paused, self.stats.refuses_new)
        self.stats = stats
        if (stats.paused, stats.refuses_new) != before:
            self._loop.call_soon_threadsafe(self.tell)
        elif not self._signalled:
            self._signalled = True
            self._loop.call_soon_threadsafe(self._changed.set)

    def changed(self) -> None:
        """Records that a part of the load other than the stats may have changed."""
        self._changed.set()

    def greet(self, stream: PeerStream) -> None:
        """Sends the first load on a new stream."""
        self._put(stream, self._unaged(stream), self._loop.time())

    def tell(self) -> float:
        """Sends the load on each stream whose load has changed or is as old as a beat.

        Returns:
            The seconds until the next load is as old as a beat.
        """
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
        """Sends reports until it is cancelled."""
        while True:
            due_s = self.tell()
            await asyncio.sleep(self._gap_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due_s - self._gap_s, 0.0)):
                    await self._changed.wait()

    def _put(self, stream: PeerStream, load: worker_pb2.WorkerLoad, now: float) -> None:
        """Sends the load with the figures that change in every step, which do not count as changes."""
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
        """Returns the part of the load whose changes are reported."""
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
