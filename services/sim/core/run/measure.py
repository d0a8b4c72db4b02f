"""Measures the steps of a real executor under the real scheduler, over varied prompts, batches and contexts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from services.sim.core.run.fit import StepTiming
from services.sim.core.run.worker import NoText
from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.messages import Submit
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.core.scheduler import Scheduler
from services.worker.exec.contracts.protocol import Executor

WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class MeasureShape:
    """batches x prompts are all tried; each round decodes `output` tokens per request. Lengths in tokens."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    output: int = 16

    @property
    def pool_tokens(self) -> int:
        """KV in tokens that holds the largest round twice over, so that the scheduler never holds requests back."""
        return 2 * max(self.batches) * (max(self.prompts) + self.output)

    def rounds(self, capacity: int, context_len: int) -> list[tuple[int, int]]:
        """(batch, prompt) pairs that fit a KV pool of `capacity` tokens and the context."""
        pairs = itertools.product(self.batches, self.prompts)
        return [(b, p) for b, p in pairs if 2 * b * (p + self.output) <= capacity and p + self.output <= context_len]


def measure(executor: Executor, config: SchedulerConfig, shape: MeasureShape, clock: Callable[[], float]) -> list[StepTiming]:
    """Wall time of each step from launch to result, one at a time; the first ones are forgotten. Raises ExecutorError."""
    core = Scheduler(config, NoText())
    rng = np.random.default_rng(0)
    handles = itertools.count()
    timings: list[StepTiming] = []
    rounds = shape.rounds(config.num_pages * config.page_size, config.context_len)
    if not rounds:
        raise ValueError("no batch and prompt of the given sizes fit this model's context and KV pool")
    for batch, prompt in rounds:
        params = SamplingParams(max_new_tokens=shape.output, temperature=0.0, ignore_eos=True)
        for handle in itertools.islice(handles, batch):
            ids = rng.integers(0, config.vocab_size, prompt, dtype=np.int32)
            core.submit(Submit(0, handle, "", ids, params), clock())
        timings += _drain(core, executor, clock)
    return timings[WARM_UP_STEPS:]


def _drain(core: Scheduler, executor: Executor, clock: Callable[[], float]) -> Iterator[StepTiming]:
    while (plan := core.plan(clock())) is not None:
        begun = time.perf_counter()
        run = executor.forward(plan)
        executor.sample(run, {})
        result = executor.wait(run)
        seconds = time.perf_counter() - begun
        core.commit(result, clock())
        core.take_output()
        yield StepTiming.of(plan, seconds)
