"""Runs gateways and workers on a trace and one virtual clock.

The product's code makes the decisions; times and tokens are simulated.

1. A request arrives at a gateway. The gateway searches the request's blocks in its own index, and picks a worker or queues the
   request.
2. Each worker runs its loop with simulated steps.
3. Every report_s, workers send load reports and batches of cache events, which arrive with the delays of FleetConfig.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rootstock_llm.services.sim.core.run.remote_reads import OpenReservations, RemoteReads
from rootstock_llm.services.sim.core.run.simulation import SimulationError
from rootstock_llm.services.sim.core.trace.arrivals import Arrivals
from rootstock_llm.services.sim.core.trace.script import Script
from rootstock_llm.services.sim.core.trace.trace import Trace
from rootstock_llm.services.sim.fleet.config import FleetConfig, Kill
from rootstock_llm.services.sim.fleet.event_queue import EventQueue
from rootstock_llm.services.sim.fleet.gateway import FleetGateway
from rootstock_llm.services.sim.fleet.logs import FleetLog
from rootstock_llm.services.sim.fleet.worker import FleetWorker, PrefetchMessage, WorkerTally, worker_name
from rootstock_llm.services.worker.core.contracts.messages import FinishReason, PeerOutput, Submit
from rootstock_llm.services.worker.core.contracts.reservations import KvSource

MAX_SILENCE_S = 600.0  # longest time without any output while requests are open


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """The result of a fleet's run."""

    config: FleetConfig
    log: FleetLog
    seconds: float  # virtual time from the first arrival to the last output
    tallies: tuple[WorkerTally, ...]  # work of each worker over all its starts
    max_queue: int  # longest queue of one gateway

    @property
    def steps(self) -> int:
        return sum(tally.steps for tally in self.tallies)


class FleetSimulation:
    """A run of one policy. The same arguments give the same outcome."""

    def __init__(self, config: FleetConfig, policy: str, trace: Trace, arrivals: Arrivals) -> None:
        self._config, self._trace, self._arrivals = config, trace, arrivals
        self._script = Script(trace)
        self._clock = EventQueue()
        self._rng = random.Random(config.seed)
        self._log = FleetLog(len(trace.requests))
        self._num_open = 0
        self._last_news = 0.0  # time of the last arrival or output
        self._next_pump: float | None = None  # time of the next scheduled call of _pump(); None: none is scheduled
        self._past = [WorkerTally() for _ in range(config.workers)]  # tallies of earlier starts of each worker
        self._reservations = OpenReservations()
        self._row_at = {worker_name(row): row for row in range(config.workers)}
        self.workers = [self._worker(row, 1) for row in range(config.workers)]
        placed = self._log.placements.placed
        self.gateways = [
            FleetGateway(
                n,
                policy,
                config,
                trace,
                self._script,
                self._clock,
                self._send,
                self._send_prefetch,
                placed,
                self._output_received,
            )
            for n in range(config.gateways)
        ]
        for gateway in self.gateways:
            for worker in self.workers:
                gateway.worker_up(worker)

    def run(self) -> FleetOutcome:
        """Runs until every request has ended. Raises SimulationError if outputs stop or a worker breaks an invariant."""
        for kill in self._config.kills:
            self._clock.at(kill.at, self._kill, kill)
        self._tick()
        self._pump()
        while self._num_open or self._arrivals.num_unsent:
            self._clock.step()
        found = [sentence for worker in self.workers if worker.alive for sentence in worker.self_check()]
        if found:
            raise SimulationError("; ".join(found))
        tallies = tuple([past + worker.tally() for past, worker in zip(self._past, self.workers, strict=True)])
        begin = float(min(self._log.requests.sent))
        return FleetOutcome(self._config, self._log, self._last_news - begin, tallies, max(g.max_queue for g in self.gateways))

    def _worker(self, row: int, generation: int) -> FleetWorker:
        return FleetWorker(row, generation, self._config, self._script, self._clock, self._send_output, self._reads(row))

    def _reads(self, row: int) -> RemoteReads | None:
        roles, page_size = self._config.roles, self._config.scheduler.page_size
        if roles is None:
            return None
        address, page_bytes = worker_name(row), roles.kv_bytes_per_token * page_size
        return RemoteReads(address, self._reservations, roles.wire, page_bytes, page_size, self._send_release)

    def _send_release(self, source: KvSource, at: float) -> None:
        """Sends the release of a KV reservation over the wire."""
        roles = self._config.roles
        assert roles is not None, "only workers with roles have KV reservations"
        self._clock.at(at + roles.wire.latency_s, self._deliver_release, source)

    def _deliver_release(self, source: KvSource) -> None:
        self.workers[self._row_at[source.address]].release_reservation(source.reservation)

    def _pump(self) -> None:
        """Sends the requests that are due, each to a random gateway, and schedules the next call."""
        now = self._clock.now
        if self._next_pump is not None and self._next_pump <= now:
            self._next_pump = None
        for index in self._arrivals.due(now):
            self._log.requests.sent[index] = self._last_news = now
            self._num_open += 1
            self.gateways[self._rng.randrange(len(self.gateways))].arrive(index)
        next_at = self._arrivals.next_at()
        if next_at is not None and (self._next_pump is None or next_at < self._next_pump):
            self._next_pump = next_at
            self._clock.at(next_at, self._pump)

    def _send(self, row: int, message: Submit, hands_over: bool) -> None:
        self._clock.after(self._config.hop_s, self._deliver, row, message, hands_over)

    def _deliver(self, row: int, message: Submit, hands_over: bool) -> None:
        self.workers[row].deliver(message, hands_over)

    def _send_prefetch(self, row: int, message: PrefetchMessage) -> None:
        self._clock.after(self._config.hop_s, self._deliver_prefetch, row, message)

    def _deliver_prefetch(self, row: int, message: PrefetchMessage) -> None:
        self.workers[row].receive_prefetch(message)

    def _send_output(self, worker: FleetWorker, output: PeerOutput) -> None:
        self._clock.after(self._config.hop_s, self.gateways[output.peer].receive, worker, output)

    def _output_received(self, output: PeerOutput) -> None:
        self._last_news = now = self._clock.now
        self._log.requests.add_outputs(output.handles, output.counts, now)
        self._log.handovers.add_outputs(output.handles, now)
        for finish in output.finishes:
            if finish.reason is FinishReason.HANDED_OVER:
                self._log.handovers.handed_over(finish, now)
                continue
            self._log.requests.end(self._log.handovers.whole(finish), now)
            self._num_open -= 1
            self._arrivals.ended(finish.handle, now)
        if output.finishes:
            self._pump()

    def _tick(self) -> None:
        config, clock = self._config, self._clock
        if self._num_open and clock.now - self._last_news > MAX_SILENCE_S:
            raise SimulationError(f"no output for {MAX_SILENCE_S:g} s while {self._num_open} requests were open")
        loads = [worker.load() for worker in self.workers]
        self._log.loads.add(clock.now, [load.num_open for load in loads])
        for worker in self.workers:
            events = worker.take_cache_events() if worker.alive else None
            for gateway in self.gateways if events else ():
                clock.after(config.index_delay_s, gateway.receive_events, worker.name, worker.generation, events)
        for gateway in self.gateways:
            clock.after(config.hop_s, gateway.receive_loads, loads)
        clock.after(config.report_s, self._tick)

    def _kill(self, kill: Kill) -> None:
        worker = self.workers[kill.worker]
        if not worker.alive:
            return
        worker.kill()
        self._reservations.drop(worker.name)
        for gateway in self.gateways:
            self._clock.after(self._config.detect_s, gateway.worker_down, worker)
        if kill.back_after_s:
            self._clock.after(kill.back_after_s, self._restart, worker)

    def _restart(self, dead: FleetWorker) -> None:
        self._past[dead.row] += dead.tally()
        worker = self.workers[dead.row] = self._worker(dead.row, dead.generation + 1)
        for gateway in self.gateways:
            self._clock.after(self._config.hop_s, gateway.worker_up, worker)
