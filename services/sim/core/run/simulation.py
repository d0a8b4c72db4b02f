"""Runs the real scheduler on a trace with a time model and a virtual clock, in the order of the worker's scheduler loop.

With overlap, step N+1 is planned and launched before step N is committed. Without overlap, the commit comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from rootstock_llm.services.sim.core.run.digest import RunDigest
from rootstock_llm.services.sim.core.run.executor import SimRun
from rootstock_llm.services.sim.core.run.logs import RequestLog, StepLog
from rootstock_llm.services.sim.core.run.worker import STUCK_WAIT_S, HostTimes, SimWorker, submit_message
from rootstock_llm.services.sim.core.trace.arrivals import Arrivals
from rootstock_llm.services.sim.core.trace.script import Script
from rootstock_llm.services.sim.core.trace.trace import Trace
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.fake import TimeModel

MAX_STUCK_TURNS = 100_000  # consecutive loop iterations without a step after which the run fails


class SimulationError(RuntimeError):
    """The scheduler has stopped making progress or has broken an invariant, which is a bug."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    requests: RequestLog
    steps: StepLog
    stats: StepStats
    num_pages: int
    page_size: int
    seconds: float  # virtual time from the start to the end of the run


class Simulation:
    """A run of one worker. The same arguments give the same outcome."""

    def __init__(
        self,
        config: SchedulerConfig,
        trace: Trace,
        arrivals: Arrivals,
        time_model: TimeModel,
        host: HostTimes | None = None,
        overlap: bool = True,
        jumps: bool = True,
        digest: RunDigest | None = None,
    ) -> None:
        """Prepares a run.

        Args:
            config: configuration of the scheduler.
            trace: the requests.
            arrivals: the times at which the requests are sent.
            time_model: duration of steps.
            host: duration of the host's work; None: the work takes no time.
            overlap: whether the overlap scheduler runs.
            jumps: whether tokens that a grammar forces are added without sampling.
            digest: receives each submitted request, plan and output; None: no digest.
        """
        self._digest = digest
        self._config, self._trace, self._arrivals, self._overlap = config, trace, arrivals, overlap
        self._script = Script(trace)
        self._worker = SimWorker(config, self._script, time_model, host, jumps=jumps)
        self._clock, self._core = self._worker.clock, self._worker.core
        self._requests = RequestLog(len(trace.requests))
        self._requests.constrained[:] = [bool(request.forced) for request in trace.requests]
        self._steps = StepLog()
        self._stuck_turns = 0

    def run(self) -> Outcome:
        """Runs until every request has ended. Raises SimulationError."""
        prev: SimRun | None = None
        while prev is not None or self._arrivals.num_unsent or not self._core.idle:
            prev = self._turn(prev)
        if found := SchedulerControl(self._core).self_check():
            raise SimulationError("; ".join(found))
        config = self._config
        return Outcome(self._requests, self._steps, self._core.stats(), config.num_pages, config.page_size, self._clock.now)

    def _turn(self, prev: SimRun | None) -> SimRun | None:
        self._send_due()
        if not self._overlap:
            self._commit(prev)
        run = self._launch()
        if run is None and prev is None:
            self._wait_for_work()
        else:
            self._stuck_turns = 0
        if self._overlap:
            self._commit(prev)
        self._take_output()
        if run is None and prev is not None:  # otherwise the values of the last planning would count for the time without steps
            self._steps.sample(self._clock.now, self._core.stats())
        return run

    def _send_due(self) -> None:
        now = self._clock.now
        for index in self._arrivals.due(now):
            self._requests.sent[index] = now
            self._record("submit", index)
            self._worker.submit(submit_message(self._trace, self._script, index))

    def _launch(self) -> SimRun | None:
        planned = self._clock.now
        run = self._worker.launch()
        if run is not None:
            self._record("plan", run.plan)
            self._steps.add(run)
            self._steps.sample(planned, self._core.stats())
        return run

    def _commit(self, run: SimRun | None) -> None:
        if run is None:
            return
        self._worker.commit(run)
        self._take_output()

    def _take_output(self) -> None:
        outputs = self._core.take_output()
        now = self._clock.now
        for peer in outputs:
            self._record("output", peer)
            self._requests.add_outputs(peer.handles, peer.counts, now)
            for finish in peer.finishes:
                self._requests.end(finish, now)
                self._arrivals.ended(finish.handle, now)

    def _record(self, kind: str, value: object) -> None:
        if self._digest is not None:
            self._digest.add(kind, value)

    def _wait_for_work(self) -> None:
        """Advances the clock if no step runs: to the next arrival if there are no requests, otherwise by STUCK_WAIT_S."""
        next_at = self._arrivals.next_at()
        if self._core.idle:
            if next_at is not None:
                self._clock.pass_until(next_at)
            return
        self._stuck_turns += 1
        if self._stuck_turns > MAX_STUCK_TURNS:
            stats = self._core.stats()
            raise SimulationError(
                f"no step in {MAX_STUCK_TURNS:,} loop iterations; waiting: {stats.num_waiting}, running: {stats.num_running}"
            )
        self._clock.pass_time(STUCK_WAIT_S)
