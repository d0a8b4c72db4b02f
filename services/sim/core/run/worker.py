"""A worker without its shell: core, executor and clock, and the parts of the worker's loop for a simulation to call in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.sim.core.run.clock import VirtualClock
from services.sim.core.run.executor import SimExecutor, SimRun
from services.sim.core.run.grammar import ScriptBook, grammar_of
from services.sim.core.run.peer_reads import PeerReads
from services.sim.core.trace.script import Script
from services.sim.core.trace.trace import Trace
from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.messages import StepOutput, Submit
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.core.kv.cache_events import CacheEventLog
from services.worker.core.scheduler import Scheduler
from services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from services.worker.exec.fake import TimeModel

STUCK_WAIT_S = 0.001  # as the worker's loop waits while requests are here and none can run


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


class SimWorker:
    """events: told of cached blocks, None if nobody asks. jumps: grammars add the tokens that they leave no choice about.
    reads: from other workers, None where there are none. Times are read from `clock`, which launch and commit move."""

    def __init__(
        self,
        config: SchedulerConfig,
        script: Script,
        time_model: TimeModel,
        host: HostTimes | None = None,
        events: CacheEventLog | None = None,
        jumps: bool = True,
        reads: PeerReads | None = None,
    ) -> None:
        self.clock = VirtualClock()
        keys = PageKeys(bytes(SECRET_BYTES), b"", config.page_size) if config.reads_peers else None
        self.core = Scheduler(config, NoText(), ScriptBook(script, jumps), events, keys=keys)
        self._executor = SimExecutor(script, config.max_running_requests, time_model, self.clock, reads)
        self._host = host or HostTimes()

    def submit(self, message: Submit) -> None:
        self.core.submit(message, self.clock.now)

    def launch(self) -> SimRun | None:
        """The next step; None if nothing can run before the step in flight is committed, or nothing is here."""
        for fact in self._executor.facts():
            self.core.ended(fact, self.clock.now)
        plan = self.core.plan(self.clock.now)
        self._tell_rooms()
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
        """When commit() will be done with the run, if it is called by the time the run ends."""
        return max(run.end, self.clock.now) + self._host.commit_s

    def commit(self, run: SimRun) -> None:
        """Passes the time until the run is done, and takes it in."""
        result = self._executor.wait(run)
        self.core.commit(result, self.clock.now)
        self.clock.pass_time(self._host.commit_s)

    def take_output(self) -> StepOutput | None:
        """What front ends are to be told since the last call: of rooms when they stand."""
        self._tell_rooms()
        return self.core.take_output()

    def _tell_rooms(self) -> None:
        events = self.core.take_rooms()
        if events is not None:
            self._executor.rooms(events)


def submit_message(trace: Trace, script: Script, index: int, peer: int = 0) -> Submit:
    """The request at a place of the trace, which is its handle and what the executor finds its output by."""
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
