"""Simulates a worker of the fleet: its scheduler loop runs as events on the fleet's clock, and only while the worker has work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rootstock_llm.services.shared.index.prefix_index import block_hash, root_hash
from rootstock_llm.services.sim.core.run.executor import SimRun
from rootstock_llm.services.sim.core.run.remote_reads import RemoteReads
from rootstock_llm.services.sim.core.run.worker import STUCK_WAIT_S, SimWorker
from rootstock_llm.services.sim.core.trace.script import Script
from rootstock_llm.services.sim.fleet.config import FleetConfig
from rootstock_llm.services.sim.fleet.event_queue import EventQueue
from rootstock_llm.services.worker.core.contracts.messages import PeerOutput, Prefetch, Submit
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation, ReservationReleased
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog, CacheEvents
from rootstock_llm.services.worker.loop.inbox import Abort, PrefetchMore

MODEL = "simulated"
IDLE_CHECK_S = 1.0  # period in which an idle worker with KV reservations runs its scheduler loop, so that they can expire
PrefetchMessage = Prefetch | PrefetchMore | Abort
"""Messages about pages that a worker prefetches for a request."""
SendOutput = Callable[["FleetWorker", PeerOutput], None]


def namespace_root(namespace: str) -> bytes:
    """Returns the root hash, to which workers and gateways chain the first block of a prompt."""
    return root_hash(MODEL, "", MODEL, namespace)


def worker_name(row: int) -> str:
    """Returns the name of a worker, which is also the address at which its KV is read."""
    return f"worker-{row}"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load report to gateways."""

    open_by_peer: Counter[int]  # requests that have not ended, by gateway
    used_tokens: int  # tokens of KV that running requests use

    @property
    def num_open(self) -> int:
        return self.open_by_peer.total()


@dataclass(frozen=True, slots=True)
class WorkerTally:
    """Work of a worker since its start."""

    steps: int = 0
    busy_s: float = 0.0  # seconds in which the worker's device ran steps
    read_bytes: int = 0  # bytes of KV that the worker read from other workers
    ahead_bytes: int = 0  # part of read_bytes that the worker read before the request arrived
    refused_reads: int = 0  # reads that returned no pages

    def __add__(self, other: WorkerTally) -> WorkerTally:
        return WorkerTally(
            self.steps + other.steps,
            self.busy_s + other.busy_s,
            self.read_bytes + other.read_bytes,
            self.ahead_bytes + other.ahead_bytes,
            self.refused_reads + other.refused_reads,
        )


class FleetWorker:
    """A worker of the fleet."""

    def __init__(
        self,
        row: int,
        generation: int,
        config: FleetConfig,
        script: Script,
        clock: EventQueue,
        send_output: SendOutput,
        reads: RemoteReads | None = None,
    ) -> None:
        """Starts a worker without KV.

        Args:
            row: the worker's number in the fleet.
            generation: number of this start.
            config: the fleet.
            script: token ids of the trace.
            clock: clock of the fleet.
            send_output: called with (worker, output) for each gateway for which a step has outputs.
            reads: reads of other workers' KV; None without roles.
        """
        self.row, self.generation = row, generation
        self.alive = True
        scheduler = config.scheduler_of(row)
        events = CacheEventLog(scheduler.page_size, block_hash, namespace_root)
        self._sim = SimWorker(scheduler, script, config.time_model, config.host, events, reads=reads)
        self._reads = reads
        self._page_size, self._overlap = scheduler.page_size, config.overlap
        self._clock, self._send_output = clock, send_output
        self._inbox: list[Submit | ReservationReleased | PrefetchMessage] = []
        self._open: Counter[int] = Counter()
        self._flight: SimRun | None = None
        self._asleep = True
        self._wakes_at = 0.0
        self._num_reservations = 0
        self._busy_s = 0.0
        self.steps = 0

    @property
    def name(self) -> str:
        return worker_name(self.row)

    def deliver(self, message: Submit, hands_over: bool = False) -> None:
        """Receives a request; a dead worker loses it. `hands_over`: another worker decodes the request after its next token."""
        if not self.alive:
            return
        self._inbox.append(replace(message, hand_over=self._new_reservation()) if hands_over else message)
        self._open[message.peer] += 1
        self._wake_soon()

    def receive_prefetch(self, message: PrefetchMessage) -> None:
        """Receives a prefetch message; a dead worker loses it."""
        if self.alive:
            self._inbox.append(message)
            self._wake_soon()

    def release_reservation(self, reservation: KvReservation) -> None:
        """Receives the release of a KV reservation by its reader; a dead worker loses the message."""
        left = self._reads.release_here(reservation) if self.alive and self._reads is not None else None
        if left is not None:
            self._inbox.append(left)
            self._wake_soon()

    def kill(self) -> None:
        """Stops the worker, which loses its requests and messages."""
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
        """Returns the events for the prefix index since the last call."""
        return self._sim.core.take_cache_events()

    def self_check(self) -> list[str]:
        """Returns the broken invariants of the core, as sentences."""
        return SchedulerControl(self._sim.core).self_check()

    def _new_reservation(self) -> KvReservation:
        """Returns a new KV reservation. Its epoch is the worker's generation, so that all reservations of a worker differ."""
        self._num_reservations += 1
        secret = f"{self.row}/{self.generation}/{self._num_reservations}".encode().rjust(RESERVATION_SECRET_BYTES, b"-")
        return KvReservation(self._num_reservations, self.generation, secret[-RESERVATION_SECRET_BYTES:])

    def _wake_soon(self) -> None:
        if self._asleep:
            self._asleep = False
            self._clock.after(0.0, self._turn)

    def _wake_at(self, at: float) -> None:
        """Schedules a wake-up, which replaces an earlier one."""
        self._wakes_at = at
        self._clock.at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if self._asleep and self._wakes_at == at:
            self._asleep = False
            self._turn()

    def _turn(self) -> None:
        """Runs one iteration of the scheduler loop. With overlap: messages, plan, commit. Without: messages, commit, plan."""
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

    def _take(self, message: Submit | ReservationReleased | PrefetchMessage) -> None:
        core, now = self._sim.core, self._sim.clock.now
        match message:
            case Submit():
                self._sim.submit(message)
            case ReservationReleased():
                core.release_reservation(message)
            case Prefetch():
                core.prefetch(message, now)
            case PrefetchMore(peer, ready):
                core.prefetch_more(peer, ready, now)
            case Abort(peer, handle):
                core.abort(peer, handle, now)

    def _launch(self) -> None:
        run = self._sim.launch()
        self._send_outputs()
        before, self._flight = self._flight, run
        if before is not None:
            self._clock.at(self._sim.commit_ends(before), self._commit, before)
        elif run is not None:
            self._clock.at(self._sim.clock.now, self._turn)
        else:
            self._rest()

    def _rest(self) -> None:
        """Schedules the next iteration if no step runs: at the end of a read, or after a short wait if there are requests.

        An idle worker without reads or reservations sleeps until a message arrives.
        """
        read_at = None if self._reads is None else self._reads.next_end()
        if not self._sim.core.idle:
            stuck_until = self._clock.now + STUCK_WAIT_S
            self._clock.at(stuck_until if read_at is None else min(stuck_until, read_at), self._turn)
            return
        self._asleep = True
        if read_at is not None:
            self._wake_at(read_at)
        elif self._reads is not None and self._reads.num_reservations:
            self._wake_at(self._clock.now + IDLE_CHECK_S)

    def _commit(self, run: SimRun) -> None:
        if not self.alive:
            return
        self._sim.commit(run)
        self.steps += 1
        self._busy_s += run.end - run.begin
        self._send_outputs()
        if self._overlap:
            self._turn()
        else:
            self._flight = None
            self._launch()

    def _send_outputs(self) -> None:
        outputs = self._sim.take_output()
        for peer in outputs:
            self._open[peer.peer] -= len(peer.finishes)
            self._send_output(self, peer)
