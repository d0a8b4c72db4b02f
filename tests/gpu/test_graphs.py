"""Tests that decode steps with CUDA graphs give the same tokens as decode steps without them, for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams
from rootstock_llm.services.worker.exec.build import DeviceExecutor
from tests.exec.device_executors import GRAPH_ROWS, executor_of
from tests.exec.driver import Driver, Sequence
from tests.exec.tiny_models import MODELS
from tests.gpu.served import Asked, Served, config_for, greedy
from tests.gpu.truth import prompts_of

VOCAB = 257
SLOTS = GRAPH_ROWS + 4  # more slots than the largest graph has rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    MODELS["qwen3"].build(folder)
    return folder


@pytest.fixture(scope="module")
def executors(folder: Path, device: str) -> Iterator[tuple[Any, Any]]:
    """An executor with CUDA graphs, and one without."""
    both = [executor_of(folder, device, max_slots=SLOTS, cuda_graphs=graphs) for graphs in (True, False)]
    yield both[0], both[1]
    for executor in both:
        executor.close()


def replayed(executor: DeviceExecutor, plan: BatchPlan) -> bool:
    graphs = executor.runner.graphs
    return graphs is not None and not plan.num_extend and graphs.for_rows(plan.num_rows) is not None


def run_both(
    executors: tuple[Any, Any], asked: list[Asked], rows: int
) -> tuple[list[list[int]], list[list[int]], list[BatchPlan]]:
    config = config_for(VOCAB, max_running_requests=rows)
    with_graphs, without = Served(config, executors[0]), Served(config, executors[1])
    outputs = [[answer.tokens for answer in served.run(asked)] for served in (with_graphs, without)]
    return outputs[0], outputs[1], with_graphs.plans


@pytest.mark.by_day(one_in=6, seed=3)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, GRAPH_ROWS])
def test_graphs_give_the_same_tokens_with_any_number_of_padding_rows(executors: tuple[Any, Any], rows: int) -> None:
    """The outputs have different lengths, so that the number of rows decreases step by step."""
    prompts = prompts_of(VOCAB, [4 + 3 * row for row in range(rows)], seed=rows)
    outputs, want, plans = run_both(executors, [(prompt, greedy(12 + 2 * row)) for row, prompt in enumerate(prompts)], rows)
    assert outputs == want
    assert sum(replayed(executors[0], plan) for plan in plans) >= 10


def test_steps_run_without_a_graph_when_the_rows_exceed_the_largest_graph(executors: tuple[Any, Any]) -> None:
    prompts = prompts_of(VOCAB, [5] * SLOTS, seed=3)
    outputs, want, plans = run_both(executors, [(prompt, greedy(8 + row)) for row, prompt in enumerate(prompts)], SLOTS)
    assert outputs == want
    decodes = [plan for plan in plans if not plan.num_extend]
    assert {replayed(executors[0], plan) for plan in decodes} == {True, False}, "some steps must use a graph, and others must not"


def test_graph_applies_sampling_parameters(executors: tuple[Any, Any]) -> None:
    """Rounding may change a sampled token near the boundary between two tokens. At most one of 12 outputs may differ by this."""
    rules: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 0.0, "presence_penalty": 1.0, "min_new_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB, 2))},
        {"temperature": 0.8, "top_p": 0.8, "seed": 5},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.05, "seed": 1 << 63},
        {"temperature": 0.0, "banned_token_ids": tuple(range(0, VOCAB, 3)), "logit_bias": ((7, 2.0), (8, -9.0))},
        {"temperature": 1.0, "allowed_token_ids": tuple(range(40, 90)), "seed": 9},
    ]
    prompts = prompts_of(VOCAB, [3 + row for row in range(12)], seed=8)
    asked = [(prompt, SamplingParams(max_new_tokens=24, **rules[row % len(rules)])) for row, prompt in enumerate(prompts)]
    said, want, _ = run_both(executors, asked, 12)
    assert sum(mine != other for mine, other in zip(said, want, strict=True)) <= 1
    for row in (4, 10):
        assert all(token % 3 for token in said[row])
    for row in (5, 11):
        assert set(said[row]) <= set(range(40, 90))


def test_graph_applies_a_grammar_mask_only_in_the_step_of_the_mask(executors: tuple[Any, Any]) -> None:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    words[250 // 32] = 1 << 250 % 32
    outputs = []
    for executor in executors:
        driver = Driver(executor, 4)
        rows = [Sequence(prompt, slot, greedy(32)) for slot, prompt in enumerate(prompts_of(VOCAB, [5, 6, 7], seed=4))]
        driver.prefill(rows)
        for masks in ({1: words}, {}, {0: words, 2: words}, {}):
            driver.step([(row, 1) for row in rows], masks)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]
    assert [output.count(250) >= 1 for output in outputs[0]] == [True] * 3 and outputs[0][1][1] == outputs[0][0][3] == 250


def test_graph_computes_several_known_tokens_of_a_row(executors: tuple[Any, Any]) -> None:
    """A row with several known tokens takes one row of the graph per token. The other rows must not change its result."""
    runner, outputs = executors[0].runner, []
    runner.graph_limits = GraphLimits(GRAPH_ROWS, 10_000)
    before = runner.stats.eager_steps
    for executor in executors:
        driver = Driver(executor, 4)
        rows = [Sequence(prompt, slot, greedy(32)) for slot, prompt in enumerate(prompts_of(VOCAB, [40, 6, 7], seed=6))]
        driver.prefill(rows)
        for count in (1, 9, 3, 15, 1):
            first = rows[0]
            first.prompt, first.output = [*first.tokens, *range(20, 19 + count)], []
            driver.step([(first, count), (rows[1], 1), (rows[2], 1)])
        driver.decode(rows[1:], 8)
        outputs.append([row.tokens for row in rows])
    assert outputs[0] == outputs[1]
    assert runner.stats.eager_steps == before + 2, (
        "only two steps may run without a graph: that with the prompts, and that with 15 known tokens and 2 decode rows"
    )
