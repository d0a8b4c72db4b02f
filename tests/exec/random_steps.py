"""Runs random requests through the scheduler, with a real executor and then with the fake one.

The real executor's results are recorded, and the fake executor repeats them. Both runs must have equal plans, and results of
equal shapes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, DryParams, EmbeddingParams, StepResult
from rootstock_llm.services.worker.core.contracts.transfers import Fact, PageOperation
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, DraftTokens, Executor, Masks, Run
from rootstock_llm.services.worker.exec.fake import FakeExecutor, FakeRun
from tests.benchmarks.pinned_config import pinned_config
from tests.core.fake_grammar import spec
from tests.core.harness import Engine

CONTEXT, VOCAB, EOS = 96, 257, 5
MAX_SLOTS, POOL_TOKENS = 9, 640


@dataclass
class Recorder:
    """Forwards all calls to the executor and records the results by step id."""

    executor: Executor
    results: dict[int, StepResult] = field(default_factory=dict)

    def forward(self, plan: BatchPlan) -> Run:
        return self.executor.forward(plan)

    def draft_tokens(self, run: Run) -> DraftTokens:
        return self.executor.draft_tokens(run)

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        self.executor.sample(run, masks, behind)

    def wait(self, run: Run) -> StepResult:
        result = self.results[run.plan.step_id] = self.executor.wait(run)
        return result

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        self.executor.transfer(operations)

    def facts(self) -> Sequence[Fact]:
        return self.executor.facts()


class Repeater(FakeExecutor):
    """A fake executor that returns recorded results, after checking that its own results have the same shapes."""

    def __init__(self, config: SchedulerConfig, recorded: dict[int, StepResult]) -> None:
        slots, pages = config.max_running_requests, config.max_pages_per_request
        super().__init__(config.num_pages, config.page_size, slots, pages, config.vocab_size)
        self._recorded = recorded

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        super().sample(run, masks, behind)
        assert isinstance(run, FakeRun)
        rows = np.flatnonzero(run.plan.sample)
        run.tokens[rows] = self._recorded[run.plan.step_id].tokens[rows]
        self.future_map[run.plan.slots[rows]] = run.tokens[rows]

    def wait(self, run: Run) -> StepResult:
        own, recorded = super().wait(run), self._recorded[run.plan.step_id]
        where = f"step {own.step_id}"
        assert len(own.tokens) == len(recorded.tokens), where
        assert set(own.logprobs) - set(recorded.faults) <= set(recorded.logprobs) <= set(own.logprobs), where
        assert set(own.embeddings) - set(recorded.faults) == set(recorded.embeddings) - set(recorded.faults), where
        assert set(own.prompt_logprobs) - set(recorded.faults) == set(recorded.prompt_logprobs) - set(recorded.faults), where
        for row, values in recorded.logprobs.items():
            theirs = own.logprobs[row]
            assert (len(values.top), len(values.chosen)) == (len(theirs.top), len(theirs.chosen)), where
        for row, scores in recorded.prompt_logprobs.items():
            theirs_too = own.prompt_logprobs[row]
            assert scores.values.shape == theirs_too.values.shape, where
            assert scores.top.shape == scores.top_ids.shape == theirs_too.top.shape, where
            assert scores.chosen.shape == theirs_too.chosen.shape, where
        return recorded


class Turned(Engine):
    """The test engine of the core with any executor. It records the core's statistics after each iteration of the loop."""

    def __init__(self, config: SchedulerConfig, overlap: bool, executor: Any) -> None:
        super().__init__(config, overlap)
        self.executor = executor
        self.stats: list[StepStats] = []

    def _check_cached_pages(self, nodes: Sequence[TreeNode]) -> None:
        if isinstance(self.executor, Repeater):
            super()._check_cached_pages(nodes)  # only a fake executor has the memory that this check reads

    def turn(self) -> bool:
        busy = super().turn()
        self.stats.append(self.core.stats())
        return busy


def random_config(rng: random.Random, page_size: int) -> SchedulerConfig:
    """Returns a random configuration for an executor with MAX_SLOTS slots and POOL_TOKENS KV tokens."""
    return pinned_config(
        num_pages=rng.choice((96, 160, 320, POOL_TOKENS)) // page_size,
        page_size=page_size,
        context_len=CONTEXT,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_running_requests=rng.randint(2, MAX_SLOTS),
        max_queued_requests=1000,
        max_prefill_tokens=64,
        chunked_prefill_size=rng.choice((0, 16, 32)),
        enable_mixed_chunk=rng.random() < 0.6,
        enable_radix_cache=rng.random() < 0.8,
        retract_interval=rng.choice((0, 0, 3, 7)),
        running_timeout_s=rng.choice((0.0, 0.0, 0.5)),
        schedule_conservativeness=rng.choice((0.1, 1.0)),
        schedule_policy=rng.choice(list(SchedulePolicy)),
        max_prompt_logprob_tokens=rng.choice((16, 4096)),
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Returns a random prompt that begins with one of a few prefixes, so that prompts share prefixes."""
    stem = [rng.randrange(6, 9)] * rng.randrange(1, 40)
    return stem + [rng.randrange(6, VOCAB) for _ in range(rng.randrange(0, 24))]


def random_params(rng: random.Random, prompt_len: int) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": rng.randrange(1, CONTEXT - prompt_len + 1), "temperature": 0.0}
    if rng.random() < 0.06:
        return {"embedding": EmbeddingParams(), "max_new_tokens": 1}
    choices: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.4, {"ignore_eos": True}),
        (0.2, {"stop": (rng.choice("abcdefg"), "xyz")}),
        (0.2, {"stop_token_ids": tuple(rng.sample(range(VOCAB), 12))}),
        (0.2, {"min_new_tokens": rng.randrange(8)}),
        (0.15, {"grammar": spec(rng.randrange(4), rng.randrange(1, 30))}),
        (0.2, {"top_logprobs": rng.randrange(3), "logprob_token_ids": tuple(rng.sample(range(VOCAB), rng.randrange(3)))}),
        (0.15, {"prompt_logprobs_from": rng.randrange(prompt_len)}),
        (0.4, {"temperature": rng.choice((0.3, 1.0, 1.7)), "seed": rng.getrandbits(64)}),
        (0.2, {"top_k": rng.choice((1, 3, 50)), "top_p": rng.choice((0.3, 0.9, 1.0)), "min_p": rng.choice((0.0, 0.1))}),
        (0.15, {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3}),
        (0.1, {"logit_bias": ((rng.randrange(VOCAB), 3.0), (rng.randrange(VOCAB), -50.0))}),
        (0.1, {"banned_token_ids": tuple(rng.sample(range(VOCAB), 40))}),
        (0.05, {"allowed_token_ids": tuple(rng.sample(range(VOCAB), 20))}),
        (0.1, {"dry": DryParams(multiplier=0.8, allowed_length=1)}),
    )
    for chance, change in choices:
        if rng.random() < chance:
            params |= change
    return params


def drive(engine: Turned, seed: int, turns: int) -> Turned:
    """Submits and aborts requests at random times, and sometimes waits for all to end. Equal seeds give equal requests."""
    rng = random.Random(seed)
    handle = 0
    for _ in range(turns):
        while rng.random() < 0.35:
            prompt = random_prompt(rng)
            params = random_params(rng, len(prompt))
            salt, timeout_s = rng.choice(("", "", "tenant")), rng.choice((0.0, 0.0, 0.0, 0.3))
            for _ in range(rng.choice((1, 1, 1, 3))):
                engine.submit(handle, prompt, salt=salt, timeout_s=timeout_s, **params)
                handle += 1
        if rng.random() < 0.3:
            engine.compile()
        if rng.random() < 0.06:
            engine.abort(max(0, handle - rng.randrange(1, 12)))
        if rng.random() < 0.01:
            engine.control.flush_cache()
        if rng.random() < 0.01:
            engine.drain()
        engine.turn()
        assert engine.idle_turns < 3, "the scheduler must not stop planning while requests wait"
    engine.drain()
    return engine
