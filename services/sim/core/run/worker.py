"""Simulates the inside of a worker: core, executor and clock.

The methods of SimWorker are the parts of the worker's scheduler loop. A simulation calls them in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootstock_llm.services.sim.core.run.executor import SimExecutor, SimRun, VirtualClock
from rootstock_llm.services.sim.core.run.remote_reads import RemoteReads
from rootstock_llm.services.sim.core.trace.script import Script, ScriptBook, grammar_of
from rootstock_llm.services.sim.core.trace.trace import Trace
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import PeerOutput, Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from rootstock_llm.services.worker.exec.fake import TimeModel

STUCK_WAIT_S = 0.001  # wait of the scheduler loop while it has requests and none can run


class NoText:
    """A decoder that returns no text, because traces have no stop strings or patterns."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return ""

    def search(self, pattern: str, text: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of the host's work per step. With overlap, the device runs during this time."""

    plan_s: float = 0.0
    commit_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.plan_s >= 0 or not self.commit_s >= 0:
            raise ValueError("the host's times per plan and per commit must not be negative")


class SimWorker:
    """A scheduler with a simulated executor. launch() and commit() advance `clock`."""

    def __init__(
        self,
        config: SchedulerConfig,
        script: Script,
        time_model: TimeModel,
        host: HostTimes | None = None,
        events: CacheEventLog | None = None,
        jumps: bool = True,
        reads: RemoteReads | None = None,
    ) -> None:
        """Creates an idle worker.

        Args:
            config: configuration of the scheduler.
            script: token ids of the trace.
            time_model: duration of steps.
            host: duration of the host's work; None: the work takes no time.
            events: receives cached blocks for the prefix index; None: no events.
            jumps: whether tokens that a grammar forces are added without sampling.
            reads: reads of other workers' KV; None: no other workers.
        """
        self.clock = VirtualClock()
        keys = PageKeys(bytes(SECRET_BYTES), b"", config.page_size) if config.reads_peers else None
        self.core = Scheduler(config, NoText(), ScriptBook(script, jumps), events, keys=keys)
        self._executor = SimExecutor(script, config.max_running_requests, time_model, self.clock, reads)
        self._host = host or HostTimes()

    def submit(self, message: Submit) -> None:
        self.core.submit(message, self.clock.now)

    def launch(self) -> SimRun | None:
        """Launches the next step. Returns None if no step can run before a commit, or if there are no requests."""
        for fact in self._executor.facts():
            self.core.ended(fact, self.clock.now)
        plan = self.core.plan(self.clock.now)
        self._pass_reservations()
        if plan is None:
            return None
        if plan.operations:
            self._executor.transfer(plan.operations)
        if not plan.num_rows:
            return None
        self.clock.pass_time(self._host.plan_s)
        run = self._executor.forward(plan)
        self._executor.sample(run, {})
        return run

    def commit_ends(self, run: SimRun) -> float:
        """Returns the time at which commit() ends if the caller calls it between now and the end of the step."""
        return max(run.end, self.clock.now) + self._host.commit_s

    def commit(self, run: SimRun) -> None:
        """Advances the clock to the end of the run and commits its result."""
        result = self._executor.wait(run)
        self.core.commit(result, self.clock.now)
        self.clock.pass_time(self._host.commit_s)

    def take_output(self) -> tuple[PeerOutput, ...]:
        """Returns the outputs since the last call. The executor first opens the KV reservations that the outputs name."""
        self._pass_reservations()
        return self.core.take_output()

    def _pass_reservations(self) -> None:
        events = self.core.take_reservation_events()
        if events is not None:
            self._executor.change_reservations(events)


def submit_message(trace: Trace, script: Script, index: int, peer: int = 0) -> Submit:
    """Returns the message of a request. Its index in the trace is also its handle and its seed."""
    request = trace.requests[index]
    grammar = grammar_of(trace, index)
    return Submit(
        peer,
        index,
        f"request {index}",
        script.prompt(index),
        SamplingParams(max_new_tokens=request.max_new_tokens, temperature=0.0, seed=index, grammar=grammar),
        salt=request.salt,
        priority=request.priority,
        lora=request.lora,
        routing_key=request.routing_key,
    )
