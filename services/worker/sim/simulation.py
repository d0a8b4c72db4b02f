"""Runs the real scheduler on a trace, a time model and a virtual clock: the worker's loop with nothing real around it.

With overlap, step N+1 is planned and launched before step N is committed; without, the same loop commits first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.core.config import SchedulerConfig
from services.worker.core.messages import StepStats, Submit
from services.worker.core.sampling import SamplingParams
from services.worker.core.scheduler import Scheduler
from services.worker.exec.fake import TimeModel
from services.worker.sim.arrivals import Arrivals
from services.worker.sim.clock import VirtualClock
from services.worker.sim.executor import SimExecutor, SimRun
from services.worker.sim.logs import RequestLog, StepLog
from services.worker.sim.script import Script
from services.worker.sim.trace import Trace

STUCK_WAIT_S = 0.001  # as the worker's loop waits while requests are here and none can run
MAX_STUCK_TURNS = 100_000
PEER = 0


class SimulationError(RuntimeError):
    """The scheduler did what it must never do: it stood still, or lost pages."""


class NoText:
    """Traces have no stop strings or patterns, so there is never a text to look at."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""

    def search(self, pattern: str, text: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of the host's work, which the device does not wait for under overlap."""

    plan_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """seconds: virtual, from the start to the last output."""

    requests: RequestLog
    steps: StepLog
    stats: StepStats
    num_pages: int
    page_size: int
    seconds: float


class Simulation:
    """One run; the same arguments give the same outcome."""

    def __init__(
        self,
        config: SchedulerConfig,
        trace: Trace,
        arrivals: Arrivals,
        time_model: TimeModel,
        host: HostTimes | None = None,
        overlap: bool = True,
    ) -> None:
        self._config, self._trace, self._arrivals, self._overlap = config, trace, arrivals, overlap
        self._host = host or HostTimes()
        self._clock = VirtualClock()
        self._script = Script(trace)
        self._core = Scheduler(config, NoText())
        self._executor = SimExecutor(self._script, config.max_running_requests, time_model, self._clock)
        self._requests = RequestLog(len(trace.requests))
        self._steps = StepLog()
        self._stuck_turns = 0

    def run(self) -> Outcome:
        """Until every request has ended. Raises SimulationError."""
        prev: SimRun | None = None
        while prev is not None or self._arrivals.num_unsent or not self._core.idle:
            prev = self._turn(prev)
        if found := self._core.self_check():
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
        if run is not None:
            self._executor.sample(run, {})
        self._take_output()
        return run

    def _send_due(self) -> None:
        now = self._clock.now
        for index in self._arrivals.due(now):
            self._requests.sent[index] = now
            self._core.submit(self._submit(index), now)

    def _submit(self, index: int) -> Submit:
        request = self._trace.requests[index]
        params = SamplingParams(max_new_tokens=request.max_new_tokens, temperature=0.0, seed=index)
        return Submit(
            PEER,
            index,
            f"request {index}",
            self._script.prompt(index),
            params,
            salt=request.salt,
            priority=request.priority,
            lora=request.lora,
            routing_key=request.routing_key,
        )

    def _launch(self) -> SimRun | None:
        planned = self._clock.now
        plan = self._core.plan(planned)
        if plan is None:
            return None
        self._clock.pass_time(self._host.plan_s)
        run = self._executor.forward(plan)
        self._steps.add(run, planned, self._core.stats())
        return run

    def _commit(self, run: SimRun | None) -> None:
        if run is None:
            return
        result = self._executor.wait(run)
        self._core.commit(result, self._clock.now)
        self._clock.pass_time(self._host.commit_s)
        self._take_output()

    def _take_output(self) -> None:
        output = self._core.take_output()
        now = self._clock.now
        for peer in output.peers if output else ():
            self._requests.told(peer.handles, peer.counts, now)
            for finish in peer.finishes:
                self._requests.end(finish, now)
                self._arrivals.ended(finish.handle, now)

    def _wait_for_work(self) -> None:
        """Nothing runs: on to the next arrival, or a little further where requests wait for a time to pass."""
        next_at = self._arrivals.next_at()
        if self._core.idle:
            if next_at is not None:
                self._clock.pass_until(next_at)
            return
        self._stuck_turns += 1
        if self._stuck_turns > MAX_STUCK_TURNS:
            stats = self._core.stats()
            raise SimulationError(f"nothing runs while {stats.num_waiting} requests wait and {stats.num_running} run")
        self._clock.pass_time(STUCK_WAIT_S)
