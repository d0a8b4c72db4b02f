"""Runs the real scheduler and executor in a loop like the worker's, without the network.

The calls have the same order as in services/worker/loop/loop.py. Only the tokens that the scheduler outputs for clients count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import FinishReason, Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, Run
from tests.benchmarks.gpu.workloads import Workload


class NoText:
    """Implements TextRules for requests without stop strings and stop patterns."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def search(self, pattern: str, text: str) -> bool:
        return False


@dataclass(slots=True)
class Timing:
    """Times of a run, in seconds."""

    seconds: float = 0.0  # from the first submit until the last token is received and the device has finished
    last_first_s: float = 0.0  # from the first submit until every request has its first token
    output_tokens: int = 0  # sum over all requests
    steps: int = 0  # launched steps
    marks: list[tuple[float, int]] = field(default_factory=list)  # time and total output tokens after each commit

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def step_s(self) -> float:
        """Returns the median seconds between the tokens of consecutive steps, without the first few steps."""
        return _median_gap([at for at, _ in self.marks[4:]])

    def decode_step_s(self, steps: int) -> tuple[float, float]:
        """Returns the median seconds between the tokens of consecutive steps, for the first and for the last `steps` steps.

        Only steps in which all requests decode count.
        """
        times = [at for at, _ in self.marks if at >= self.last_first_s]
        return _median_gap(times[: steps + 1]), _median_gap(times[-steps - 1 :])


def _median_gap(times: Sequence[float]) -> float:
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


class Serving:
    def __init__(self, config: SchedulerConfig, executor: Executor, overlap: bool = True) -> None:
        self.core = Scheduler(config, NoText())
        self.executor = executor
        self.overlap = overlap
        self._prev: Run | None = None
        self._next = 0
        self._timing = Timing()
        self._begun = 0.0
        self._started: set[int] = set()  # handles of the requests that have their first token
        self._empty_turns = 0

    def submit(self, prompt: NDArray[np.int32], new_tokens: int, temperature: float = 0.0) -> None:
        self._next += 1
        params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True, seed=self._next)
        self.core.submit(Submit(0, self._next, f"r{self._next}", prompt, params), time.monotonic())

    def run(self, workload: Workload) -> Timing:
        """Submits all requests and runs until the last one ends.

        Raises:
            RuntimeError: a request ended before its number of output tokens.
        """
        self.begin()
        for prompt, new_tokens in zip(workload.prompts, workload.new_tokens, strict=True):
            self.submit(prompt, new_tokens, workload.temperature)
        self.turn_until(lambda: self.core.idle and self._prev is None)
        timing = self.end()
        if timing.output_tokens != workload.output_tokens:
            raise RuntimeError(f"the run gave {timing.output_tokens} tokens instead of {workload.output_tokens}")
        return timing

    def begin(self) -> None:
        self._timing, self._begun = Timing(), time.perf_counter()
        self._started.clear()

    def end(self) -> Timing:
        """Commits the step in flight and returns the times of the run."""
        self._commit()
        self._timing.seconds = time.perf_counter() - self._begun
        return self._timing

    def turn_until(self, over: Callable[[], bool]) -> None:
        while not over():
            self.turn()

    def turn(self) -> BatchPlan | None:
        """Runs one iteration of the loop and returns the launched plan, if any. Raises RuntimeError if no step can run."""
        self._empty_turns = 0 if self._prev is not None else self._empty_turns + 1
        if self._empty_turns > 2:
            raise RuntimeError(f"no step can run: {self.core.stats()}")
        if not self.overlap:
            self._commit()
        plan = self.core.plan(time.monotonic())
        run = self.executor.forward(plan) if plan is not None else None
        self._commit()
        if run is not None:
            self.executor.sample(run, {})
            self._timing.steps += 1
        self._prev = run
        return plan

    def forget(self) -> None:
        """Ends all requests and drops all cached prefixes."""
        self._commit()
        self.core.end_all("the run is over", time.monotonic())
        self.core.take_output()
        SchedulerControl(self.core).flush_cache()

    def close(self) -> None:
        """Closes the executor and drops the references to it, so that its memory can be freed."""
        self.executor.close()
        del self.executor
        self._prev = None

    def _commit(self) -> None:
        run, self._prev = self._prev, None
        if run is None:
            return
        self.core.commit(self.executor.wait(run), time.monotonic())
        outputs = self.core.take_output()
        before = len(self._started)
        for peer in outputs:
            self._timing.output_tokens += len(peer.tokens)
            self._started.update(peer.handles)
            for finish in peer.finishes:
                if finish.reason is not FinishReason.LENGTH:
                    raise RuntimeError(f"request {finish.request_id} ended early: {finish.message or finish.reason.name}")
        self._timing.marks.append((time.perf_counter() - self._begun, self._timing.output_tokens))
        if len(self._started) > before:
            self._timing.last_first_s = self._timing.marks[-1][0]
