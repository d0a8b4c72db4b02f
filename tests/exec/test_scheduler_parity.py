"""The real scheduler with the executor on host streams gives transformers' greedy tokens in any schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import FinishReason, Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams
from rootstock_llm.services.worker.core.invariants import violations
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, Run
from rootstock_llm.services.worker.exec.fake import FakeExecutor
from tests.core.deployed_config import deployed_config
from tests.exec.guesses import Guesses
from tests.exec.host_executors import build_host_executor, on_both_kernels
from tests.exec.test_speculation import guess_with
from tests.exec.tiny_models import MODELS, greedy_answers
from tests.exec.transformers_families import SERVED

NEW_TOKENS = 64
PAGE_SIZE = 4
COLUMNS = ("mode", "num_extend", "slots", "starts", "num_tokens", "sample", "table_slots", "table_firsts", "table_pages")
FAMILIES = ("llama-untied", "mistral-window", "qwen2", "qwen3", "qwen3.5-window", "gemma3", "qwen3.5-moe", "gpt-oss", "olmo3")
RNG = random.Random(11)
pytestmark = on_both_kernels
PROMPTS = [[RNG.randrange(6, 257) for _ in range(length)] for length in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 33, 48, 61, 80)]


class NoText:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, and transformers' outputs for PROMPTS."""

    folder: Path
    answers: list[list[int]]
    kernels: str = "cpp"


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Checkpoint]:
    return {}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
    kernel_name: str,
) -> Checkpoint:
    name = request.param
    if name not in checkpoints:
        folder = tmp_path_factory.mktemp("model")
        checkpoints[name] = Checkpoint(folder, greedy_answers((MODELS | SERVED)[name].build(folder), PROMPTS, NEW_TOKENS))
    return replace(checkpoints[name], kernels=kernel_name)


def config_for(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_pages": 1024,
        "page_size": PAGE_SIZE,
        "context_len": 512,
        "vocab_size": 257,
        "max_running_requests": 16,
        "chunked_prefill_size": 0,
    }
    return deployed_config(**{**values, **changes})


class Served:
    """A scheduler and its executor. The test runs the iterations of the scheduler loop."""

    def __init__(self, config: SchedulerConfig, executor: Executor, overlap: bool) -> None:
        self.config = config
        self.core = Scheduler(config, NoText())
        self.executor = executor
        self.overlap = overlap
        self.plans: list[BatchPlan] = []
        self.outputs: dict[int, list[int]] = {}  # output tokens by handle
        self.cached: dict[int, int] = {}  # number of cached prompt tokens by handle
        self.routed: dict[int, list[NDArray[np.uint16]]] = {}  # routed experts of each message by handle
        self._next = 0

    def run(self, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, routed_from: int = -1) -> list[list[int]]:
        """Submits requests, runs the scheduler loop until all have ended, and returns their outputs in order.

        Args:
            routed_from: see Submit.
        """
        handles = range(self._next, self._next + len(prompts))
        self._next += len(prompts)
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for handle, prompt in zip(handles, prompts, strict=True):
            ids = np.array(prompt, dtype=np.int32)
            self.core.submit(Submit(0, handle, f"r{handle}", ids, params, routed_from=routed_from), 0.0)
        prev: Run | None = None
        while prev is not None or not self.core.idle:
            prev = self._turn(prev)
        return [self.outputs[handle] for handle in handles]

    def _turn(self, prev: Run | None) -> Run | None:
        if not self.overlap:
            self._commit(prev)
            prev = None
        plan = self.core.plan(0.0)
        run = None
        if plan is not None:
            self.plans.append(plan)
            run = self.executor.forward(plan)
        self._commit(prev)
        if run is not None:
            self.executor.sample(run, {})
        assert not violations(self.core.queues, self.core.memory, self.core.sessions, self.core.tiers)
        return run

    def _commit(self, run: Run | None) -> None:
        if run is not None:
            self.core.commit(self.executor.wait(run), 0.0)
        outputs = self.core.take_output()
        for peer in outputs:
            tokens = iter(peer.tokens)
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                self.outputs.setdefault(handle, []).extend(next(tokens) for _ in range(count))
            for handle, routed in peer.routed_experts:
                self.routed.setdefault(handle, []).append(routed)
            for finish in peer.finishes:
                assert finish.reason is FinishReason.LENGTH, finish
                self.cached[finish.handle] = finish.cached_tokens


def serve(checkpoint: Checkpoint, config: SchedulerConfig, overlap: bool = True) -> Served:
    executor, info = build_host_executor(
        model_path=str(checkpoint.folder),
        dtype="float32",
        page_size=config.page_size,
        max_slots=config.max_running_requests,
        num_pages=config.num_pages,
        mem_fraction_static=0.5,
        context_len=config.context_len,
        num_threads=1,
        progress=lambda _: None,
        check_relay=True,
        kernels=checkpoint.kernels,
        max_drafts=config.max_drafts,
    )
    return Served(replace(config, groups=info.groups, state_interval=PAGE_SIZE), executor, overlap)


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_output_of_one_request_equals_transformers(checkpoint: Checkpoint, overlap: bool) -> None:
    served = serve(checkpoint, config_for(), overlap)
    assert served.run([PROMPTS[-1]]) == [checkpoint.answers[-1]]


@pytest.mark.by_day(one_in=7, seed=4)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "unmixed"])
def test_outputs_of_sixteen_ragged_requests_equal_transformers(checkpoint: Checkpoint, overlap: bool, mixed: bool) -> None:
    served = serve(checkpoint, config_for(enable_mixed_chunk=mixed, chunked_prefill_size=64), overlap)
    assert served.run(PROMPTS) == checkpoint.answers


@pytest.mark.by_day(one_in=15, seed=1)
@pytest.mark.parametrize("chunk", range(PAGE_SIZE, 81, PAGE_SIZE))
def test_output_equals_transformers_for_any_chunk_size(checkpoint: Checkpoint, chunk: int) -> None:
    served = serve(checkpoint, config_for(chunked_prefill_size=chunk))
    assert served.run([PROMPTS[-1]], 16) == [checkpoint.answers[-1][:16]]
    assert sum(plan.num_extend for plan in served.plans) == -(-80 // chunk)


@pytest.mark.by_day(one_in=4, seed=15)
def test_outputs_equal_transformers_with_a_cold_cache_and_a_full_prefix_hit(checkpoint: Checkpoint) -> None:
    served = serve(checkpoint, config_for())
    assert served.run([PROMPTS[-1]]) == [checkpoint.answers[-1]]
    longer = PROMPTS[-1] + checkpoint.answers[-1][:20]
    assert served.run([PROMPTS[-1], longer], 44) == [checkpoint.answers[-1][:44], checkpoint.answers[-1][20:]]
    cached = [served.cached[handle] for handle in range(3)]
    assert cached[:2] == [0, 76], "a prefix hit must have whole pages and leave at least one token to compute"
    # Windows and states are kept at the last page end of the prompt and of the output, not at each page end between them.
    assert cached[2] == 96 if not served.config.groups else 76 <= cached[2] < 96


@pytest.mark.by_day(one_in=3, seed=31)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_outputs_equal_transformers_with_retractions(checkpoint: Checkpoint, overlap: bool) -> None:
    served = serve(checkpoint, config_for(retract_interval=5), overlap)
    assert served.run(PROMPTS) == checkpoint.answers
    assert served.core.stats().retractions_total >= 10


@pytest.mark.by_day(one_in=6, seed=5)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("checkpoint", ["qwen3.5", "qwen3.5-window", "gemma3"], indirect=True, scope="module")
def test_outputs_equal_transformers_with_draft_tokens_and_retractions(checkpoint: Checkpoint, overlap: bool) -> None:
    """The drafter proposes transformers' tokens, with errors. Only three requests run, so that each gets four draft tokens."""
    served = serve(checkpoint, config_for(retract_interval=6, max_drafts=4, speculative_adaptive=False), overlap)
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, checkpoint.answers, strict=True)]
    guess_with(served.executor, Guesses(texts, 0.3, 257))  # type: ignore[arg-type]
    for first in (0, 6, 13):
        assert served.run(PROMPTS[first : first + 3]) == checkpoint.answers[first : first + 3]
    assert served.core.stats().retractions_total >= 5 and served.core.counters.accepted_tokens_total > 100


@pytest.mark.by_day(one_in=3, seed=4)
def test_outputs_equal_transformers_in_a_small_pool_with_all_features(checkpoint: Checkpoint) -> None:
    config = config_for(
        num_pages=120, chunked_prefill_size=16, enable_mixed_chunk=True, retract_interval=7, schedule_conservativeness=0.1
    )
    served = serve(checkpoint, config)
    assert served.run(PROMPTS) == checkpoint.answers
    assert served.run(PROMPTS) == checkpoint.answers
    assert served.core.stats().evicted_pages_total > 0


@pytest.mark.by_day(one_in=3, seed=2)
def test_fake_executor_and_real_executor_get_equal_plans(checkpoint: Checkpoint) -> None:
    config = config_for(num_pages=150, chunked_prefill_size=32, retract_interval=11, schedule_conservativeness=0.1)
    real = serve(checkpoint, config)
    sizes = config.num_pages, PAGE_SIZE, config.max_running_requests, config.max_pages_per_request, 257
    fake = Served(real.config, FakeExecutor(*sizes, groups=real.config.groups), True)
    real.run(PROMPTS)
    fake.run(PROMPTS)
    assert len(real.plans) == len(fake.plans)
    for ours, theirs in zip(real.plans, fake.plans, strict=True):
        for column in (
            "mode",
            "num_extend",
            "slots",
            "starts",
            "num_tokens",
            "sample",
            "table_slots",
            "table_firsts",
            "table_pages",
        ):
            assert np.array_equal(getattr(ours, column), getattr(theirs, column)), (ours.step_id, column)
    assert real.cached == fake.cached
