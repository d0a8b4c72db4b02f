"""A worker of the fleet: the worker's loop as events on the fleet's clock. It turns while it has something to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.shared.index.block_hash import block_hash, root_hash
from services.sim.core.run.executor import SimRun
from services.sim.core.run.peer_reads import PeerReads
from services.sim.core.run.worker import STUCK_WAIT_S, SimWorker
from services.sim.core.trace.script import Script
from services.sim.fleet.config import FleetConfig
from services.sim.fleet.event_queue import EventQueue
from services.worker.core.contracts.messages import PeerOutput, Prefetch, Submit
from services.worker.core.contracts.rooms import ROOM_SECRET_BYTES, Room, RoomLeft
from services.worker.core.kv.cache_events import CacheEventLog, CacheEvents
from services.worker.loop.inbox import Abort, PrefetchMore

MODEL = "simulated"
IDLE_CHECK_S = 1.0  # as the worker's loop turns while it is idle: rooms whose time is over end then
Word = Prefetch | PrefetchMore | Abort
"""Of what is to be read ahead of a request."""
Teller = Callable[["FleetWorker", PeerOutput], None]


def namespace_root(namespace: str) -> bytes:
    """What the first block of a prompt is chained to, at workers and gateways alike."""
    return root_hash(MODEL, "", MODEL, namespace)


def worker_name(row: int) -> str:
    """And the address at which its KV is read."""
    return f"worker-{row}"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """open_by_peer: requests without their terminal output, by gateway. used_tokens: KV that could not be freed."""

    open_by_peer: Counter[int]
    used_tokens: int

    @property
    def num_open(self) -> int:
        return self.open_by_peer.total()


@dataclass(frozen=True, slots=True)
class WorkerTally:
    """What a worker has done since its start. busy_s: that its device ran steps. read_bytes: of other workers' KV; ahead_bytes:
    of these, that came before their request. refused_reads: that brought nothing."""

    steps: int = 0
    busy_s: float = 0.0
    read_bytes: int = 0
    ahead_bytes: int = 0
    refused_reads: int = 0

    def __add__(self, other: WorkerTally) -> WorkerTally:
        return WorkerTally(
            self.steps + other.steps,
            self.busy_s + other.busy_s,
            self.read_bytes + other.read_bytes,
            self.ahead_bytes + other.ahead_bytes,
            self.refused_reads + other.refused_reads,
        )


class FleetWorker:
    """row: its number in the fleet. generation: a new one after every start. tell: takes (worker, output), one for each
    gateway that a step has news for. reads: between workers of two roles, None where there is one."""

    def __init__(
        self,
        row: int,
        generation: int,
        config: FleetConfig,
        script: Script,
        clock: EventQueue,
        tell: Teller,
        reads: PeerReads | None = None,
    ) -> None:
        self.row, self.generation = row, generation
        self.alive = True
        scheduler = config.scheduler_of(row)
        events = CacheEventLog(scheduler.page_size, block_hash, namespace_root)
        self._sim = SimWorker(scheduler, script, config.time_model, config.host, events, reads=reads)
        self._reads = reads
        self._page_size, self._overlap = scheduler.page_size, config.overlap
        self._clock, self._tell = clock, tell
        self._inbox: list[Submit | RoomLeft | Word] = []
        self._open: Counter[int] = Counter()
        self._flight: SimRun | None = None
        self._asleep = True
        self._wakes_at = 0.0
        self._rooms_given = 0
        self._busy_s = 0.0
        self.steps = 0

    @property
    def name(self) -> str:
        return worker_name(self.row)

    def deliver(self, message: Submit, hands_over: bool = False) -> None:
        """Lost if the worker is dead. hands_over: another worker goes on with it after its next token."""
        if not self.alive:
            return
        self._inbox.append(replace(message, hand_over=self._new_room()) if hands_over else message)
        self._open[message.peer] += 1
        self._wake_soon()

    def hear(self, word: Word) -> None:
        """Lost if the worker is dead."""
        if self.alive:
            self._inbox.append(word)
            self._wake_soon()

    def leave_room(self, room: Room) -> None:
        """Its reader wants no more of it."""
        left = self._reads.left_here(room) if self.alive and self._reads is not None else None
        if left is not None:
            self._inbox.append(left)
            self._wake_soon()

    def kill(self) -> None:
        """All that it has is gone."""
        self.alive = False
        self._open.clear()
        self._inbox.clear()

    def load(self) -> WorkerLoad:
        if not self.alive:
            return WorkerLoad(Counter(), 0)
        stats = self._sim.core.stats()
        pages = stats.pages_used
        return WorkerLoad(self._open.copy(), pages * self._page_size)

    def tally(self) -> WorkerTally:
        stats = self._sim.core.stats()
        read_bytes, page_bytes = (0, 0) if self._reads is None else (self._reads.read_bytes, self._reads.page_bytes)
        ahead_bytes = stats.prefetched_pages_total * page_bytes
        return WorkerTally(self.steps, self._busy_s, read_bytes, ahead_bytes, stats.refused_pulls_total)

    def take_cache_events(self) -> CacheEvents | None:
        """What the prefix index is to be told since the last call."""
        return self._sim.core.take_cache_events()

    def self_check(self) -> list[str]:
        """What breaks an invariant of the core."""
        return self._sim.core.self_check()

    def _new_room(self) -> Room:
        """The generation is its epoch: no two of a worker are the same."""
        self._rooms_given += 1
        secret = f"{self.row}/{self.generation}/{self._rooms_given}".encode().rjust(ROOM_SECRET_BYTES, b"-")
        return Room(self._rooms_given, self.generation, secret[-ROOM_SECRET_BYTES:])

    def _wake_soon(self) -> None:
        if self._asleep:
            self._asleep = False
            self._clock.after(0.0, self._turn)

    def _wake_at(self, at: float) -> None:
        """In place of what it was to be woken by before."""
        self._wakes_at = at
        self._clock.at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if self._asleep and self._wakes_at == at:
            self._asleep = False
            self._turn()

    def _turn(self) -> None:
        """As the worker's loop turns: messages, then plan and commit; without overlap, messages, then commit and plan."""
        if not self.alive:
            return
        self._sim.clock.pass_until(self._clock.now)
        for message in self._inbox:
            self._take(message)
        self._inbox.clear()
        if self._overlap or self._flight is None:
            self._launch()
        else:
            self._clock.at(self._sim.commit_ends(self._flight), self._commit, self._flight)

    def _take(self, message: Submit | RoomLeft | Word) -> None:
        core, now = self._sim.core, self._sim.clock.now
        match message:
            case Submit():
                self._sim.submit(message)
            case RoomLeft():
                core.leave_room(message)
            case Prefetch():
                core.prefetch(message, now)
            case PrefetchMore(peer, ready):
                core.prefetch_more(peer, ready, now)
            case Abort(peer, handle):
                core.abort(peer, handle, now)

    def _launch(self) -> None:
        run = self._sim.launch()
        self._tell_all()
        before, self._flight = self._flight, run
        if before is not None:
            self._clock.at(self._sim.commit_ends(before), self._commit, before)
        elif run is not None:
            self._clock.at(self._sim.clock.now, self._turn)
        else:
            self._rest()

    def _rest(self) -> None:
        """Nothing runs: until a message, what a read has come to, or a time that may have passed."""
        read_at = None if self._reads is None else self._reads.next_end()
        if not self._sim.core.idle:
            stuck_until = self._clock.now + STUCK_WAIT_S
            self._clock.at(stuck_until if read_at is None else min(stuck_until, read_at), self._turn)
            return
        self._asleep = True
        if read_at is not None:
            self._wake_at(read_at)
        elif self._reads is not None and self._reads.num_rooms:
            self._wake_at(self._clock.now + IDLE_CHECK_S)

    def _commit(self, run: SimRun) -> None:
        if not self.alive:
            return
        self._sim.commit(run)
        self.steps += 1
        self._busy_s += run.end - run.begin
        self._tell_all()
        if self._overlap:
            self._turn()
        else:
            self._flight = None
            self._launch()

    def _tell_all(self) -> None:
        output = self._sim.take_output()
        for peer in output.peers if output else ():
            self._open[peer.peer] -= len(peer.finishes)
            self._tell(self, peer)
