"""Runs requests through the real scheduler and an executor, and collects their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import Finish, Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, PromptLogprobs, RowLogprobs, SamplingParams
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, Run
from tests.benchmarks.gpu.serving import NoText
from tests.benchmarks.pinned_config import pinned_config


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def sampled_logprobs(self) -> list[float]:
        return [row.sampled for row in self.logprobs]

    @property
    def prompt_values(self) -> list[float]:
        return [float(value) for piece in self.prompt_logprobs for value in piece.values]


Asked = tuple[Sequence[int], SamplingParams]


def greedy(new_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, **more)


def config_for(vocab_size: int, **changes: Any) -> SchedulerConfig:
    """Returns a scheduler configuration that fits the executors of tests.exec.device_executors."""
    values: dict[str, Any] = {"num_pages": 1024, "page_size": 4, "context_len": 512, "max_running_requests": 16}
    limits = {"chunked_prefill_size": 256, "max_prefill_tokens": 512}
    return pinned_config(vocab_size=vocab_size, **{**values, **limits, **changes})


class Served:
    def __init__(self, config: SchedulerConfig, executor: Executor, overlap: bool = True) -> None:
        self.core = Scheduler(config, NoText())
        self.plans: list[BatchPlan] = []
        self._executor, self._overlap = executor, overlap
        self._answers: dict[int, Answer] = {}

    def run(self, requests: Sequence[Asked]) -> list[Answer]:
        """Submits all requests at once and returns their outputs in order."""
        first = len(self._answers)
        for handle, (prompt, params) in enumerate(requests, first):
            self._answers[handle] = Answer()
            self.core.submit(Submit(0, handle, f"r{handle}", np.array(prompt, dtype=np.int32), params), 0.0)
        prev: Run | None = None
        for _ in range(100_000):
            prev = self._turn(prev)
            if prev is None and self.core.idle:
                return [self._answers[handle] for handle in range(first, first + len(requests))]
        raise AssertionError("the requests have not ended after the largest number of loop iterations")

    def _turn(self, prev: Run | None) -> Run | None:
        if not self._overlap:
            self._commit(prev)
            prev = None
        plan = self.core.plan(0.0)
        run = self._executor.forward(plan) if plan is not None else None
        self._commit(prev)
        if plan is not None and run is not None:
            self.plans.append(plan)
            self._executor.sample(run, {})
        return run

    def _commit(self, run: Run | None) -> None:
        if run is not None:
            self.core.commit(self._executor.wait(run), 0.0)
        for peer in self.core.take_output():
            tokens = iter(peer.tokens)
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                self._answers[handle].tokens += [next(tokens) for _ in range(count)]
            for handle, rows in peer.logprobs:
                self._answers[handle].logprobs += rows
            for handle, values in peer.prompt_logprobs:
                self._answers[handle].prompt_logprobs.append(values)
            for finish in peer.finishes:
                self._answers[finish.handle].finish = finish
