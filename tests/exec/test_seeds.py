"""A seed determines a request's tokens at temperature 1 in float32, in any batch, chunk size, slot and cached prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from tests.exec.driver import Driver, Sequence
from tests.exec.host_executors import build_host_executor, on_both_kernels
from tests.exec.tiny_models import MODELS

NUM_NEW = 40
PAGE = 4
SAMPLING = {
    "plain": SamplingParams(NUM_NEW, temperature=1.0),
    "top-p": SamplingParams(NUM_NEW, temperature=1.0, top_p=0.9),
    "top-k-min-p": SamplingParams(NUM_NEW, temperature=1.0, top_k=40, min_p=0.02),
    "penalised": SamplingParams(NUM_NEW, temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    MODELS["qwen3"].build(made)
    return made


@pytest.fixture
def driving(folder: Path, kernel_name: str) -> Iterator[Driver]:
    executor, _ = build_host_executor(str(folder), "float32", PAGE, 32, 1024, 0.5, None, 1, lambda _: None, True, kernel_name)
    yield Driver(executor, PAGE)
    executor.close()


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 257, length).tolist()


@pytest.fixture(params=list(SAMPLING))
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return SAMPLING[request.param]


def sequences(params: SamplingParams, count: int, first_slot: int = 0, seed: int = 100) -> list[Sequence]:
    return [
        Sequence(prompt_of(20 + 3 * index, index), first_slot + index, replace(params, seed=seed + index))
        for index in range(count)
    ]


def alone(driving: Driver, params: SamplingParams, index: int) -> list[int]:
    sequence = replace(sequences(params, index + 1)[index], slot=31)
    driving.prefill([sequence])
    driving.decode([sequence], NUM_NEW)
    return sequence.output


@pytest.mark.by_day(one_in=8, seed=9)
@on_both_kernels
def test_seed_gives_equal_tokens_in_a_batch_of_sixteen_with_chunks(driving: Driver, params: SamplingParams) -> None:
    lone = [alone(driving, params, index) for index in (0, 7, 15)]
    assert len(set(lone[0])) > 8, "temperature 1 must give varied output"
    assert alone(driving, params, 7) == lone[1]
    batch = sequences(params, 16)
    driving.prefill(batch[::-1], chunk=8)
    driving.decode(batch, NUM_NEW)
    assert [batch[index].output for index in (0, 7, 15)] == lone


@pytest.mark.by_day(one_in=4, seed=6)
def test_seed_gives_equal_tokens_with_a_cached_prefix(driving: Driver, params: SamplingParams) -> None:
    cold = alone(driving, params, 7)
    others = sequences(params, 15, first_slot=8, seed=900)
    first = Sequence(prompt_of(41, 7), 0, replace(params, seed=1))
    driving.prefill([first, *others])
    cached = Sequence(prompt_of(41, 7), 1, replace(params, seed=107), pages=first.pages[:5], computed=5 * PAGE)
    assert cached.prompt == sequences(params, 8)[7].prompt
    while cached.computed < len(cached.prompt):
        driving.step([(cached, min(8, 41 - cached.computed)), *((other, 1) for other in others)])
    driving.decode([cached, first, *others], NUM_NEW)
    assert cached.output == cold


@pytest.mark.by_day(one_in=4)
def test_different_seeds_give_different_tokens(driving: Driver, params: SamplingParams) -> None:
    prompt = prompt_of(30, 1)
    rows = [Sequence(prompt, slot, replace(params, seed=slot)) for slot in range(16)]
    driving.prefill(rows)
    driving.decode(rows, 12)
    assert len({tuple(row.output) for row in rows}) == 16


@pytest.mark.by_day(one_in=4, seed=4)
def test_seed_gives_equal_tokens_after_a_retraction(driving: Driver, params: SamplingParams) -> None:
    """The retracted request continues in another slot. In that slot, extend rows compute its prompt and its output so far."""
    whole = alone(driving, params, 7)
    kept = Sequence(prompt_of(41, 7) + whole[:17], 5, replace(params, seed=107), num_prompt_tokens=41)
    driving.prefill([kept], chunk=16)
    driving.decode([kept], NUM_NEW - 17)
    assert kept.output == whole[17:]


@pytest.mark.by_day(one_in=4)
def test_seed_gives_equal_tokens_when_output_tokens_return_as_input(driving: Driver, params: SamplingParams) -> None:
    """Some output tokens are sampled in this slot, others come as input of an extend row."""
    whole = alone(driving, params, 7)
    row = Sequence(prompt_of(41, 7), 5, replace(params, seed=107))
    driving.prefill([row])
    driving.decode([row], 10)
    assert row.output == whole[:10]
    row.prompt, row.output = row.prompt + whole[:25], []
    assert row.computed == 41 + 9
    driving.step([(row, 5)])
    driving.step([(row, 11)])
    driving.decode([row], NUM_NEW - 25)
    assert row.output == whole[25:]
