"""Embeddings of a decoder equal the pooled hidden states of transformers, in chunks, in batches and during generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, EmbeddingParams, RowFault, SamplingParams, SlotParams
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.fake import FakeExecutor
from rootstock_llm.services.worker.exec.pools.embedding_pool import EmbeddingPool, PoolingConfig, PoolingKind, finite_vectors
from tests.all_pairs import each_pair, each_value
from tests.exec.driver import Driver, Sequence, greedy, i32
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import MODELS

CLOSE = 1e-5
MAX_SLOTS = 16
KINDS = list(PoolingKind)
EMBEDDERS = ["qwen3", "llama-untied"]


@dataclass(frozen=True)
class Embedder:
    folder: Path
    model: Any

    def expected(self, prompt: list[int], kind: PoolingKind, params: EmbeddingParams, normalize: bool) -> np.ndarray:
        with torch.inference_mode():
            states = self.model.model(torch.tensor([prompt])).last_hidden_state[0]
        vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[kind]
        cut = vector[: params.dimensions or None]
        return (cut / cut.norm() if normalize else cut).numpy()


@pytest.fixture(scope="module", params=EMBEDDERS)
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    folder = tmp_path_factory.mktemp(request.param)
    return Embedder(folder, MODELS[request.param].build(folder))


@pytest.fixture
def executor(embedder: Embedder) -> Iterator[DeviceExecutor]:
    built, _ = build_host_executor(
        str(embedder.folder), "float32", 4, MAX_SLOTS, 512, 0.5, None, 1, lambda _: None, check_relay=True
    )  # fmt: skip
    yield built
    built.close()


def driver(executor: DeviceExecutor, config: PoolingConfig) -> Driver:
    """Returns a driver of an executor that pools with this config instead of the model's own."""
    executor.runner._embeddings = EmbeddingPool(config)
    return Driver(executor, 4)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 257, length).tolist()


def embedding(prompt: list[int], slot: int, **options: Any) -> Sequence:
    params = SamplingParams(max_new_tokens=1, temperature=0.0, embedding=EmbeddingParams(**options))
    return Sequence(prompt, slot, params)


@pytest.mark.by_day(one_in=3, seed=2)
@each_pair(
    indirect=("embedder",),
    embedder=EMBEDDERS,
    kind=KINDS,
    chunk={"chunks-of-4": 4, "chunks-of-16": 16, "whole": 1 << 30},
)
def test_embedding_is_equal_for_any_chunk_size(
    embedder: Embedder, executor: DeviceExecutor, kind: PoolingKind, chunk: int
) -> None:
    sequence = embedding(prompt_of(41), 3)
    driver(executor, PoolingConfig(kind, True)).prefill([sequence], chunk)
    expected = embedder.expected(sequence.prompt, kind, EmbeddingParams(), True)
    assert sequence.embedding is not None and sequence.embedding.dtype == np.float32
    assert sequence.embedding.tolist() == pytest.approx(expected.tolist(), abs=CLOSE)


@pytest.mark.by_day(one_in=3, seed=13)
@each_value(
    indirect=("embedder",),
    embedder=EMBEDDERS,
    kind=KINDS,
    case={  # `normalize` of the config, options of the request, whether the vector must be normalized
        "config-no": (False, {}, False),
        "config-yes": (True, {}, True),
        "request-no": (True, {"normalize": False}, False),
        "request-yes": (False, {"normalize": True}, True),
        "cut": (True, {"dimensions": 10}, True),
        "cut-to-one": (False, {"dimensions": 1}, False),
        "cut-of-nothing": (True, {"dimensions": 64}, True),
    },
)
def test_embedding_is_cut_and_normalised_as_requested(
    embedder: Embedder, executor: DeviceExecutor, kind: PoolingKind, case: tuple[bool, dict[str, Any], bool]
) -> None:
    config, options, normalize = case
    sequence = embedding(prompt_of(11), 0, **options)
    driver(executor, PoolingConfig(kind, config)).prefill([sequence])
    expected = embedder.expected(sequence.prompt, kind, EmbeddingParams(**options), normalize)
    assert sequence.embedding is not None and sequence.embedding.shape == expected.shape
    assert sequence.embedding.tolist() == pytest.approx(expected.tolist(), abs=CLOSE)


@pytest.mark.by_day(one_in=2, seed=25)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_equal_in_a_batch_with_generation_and_reused_slots(
    embedder: Embedder, executor: DeviceExecutor, kind: PoolingKind
) -> None:
    driving = driver(executor, PoolingConfig(kind, True))
    alone, beside = Sequence(prompt_of(12), 0, greedy()), Sequence(prompt_of(12), 1, greedy())
    driving.prefill([alone])
    driving.decode([alone], 12)
    driving.prefill([beside])
    for turn in range(2):
        batch = [embedding(prompt_of(1 + 5 * index, turn), 2 + index) for index in range(8)]
        while pending := [s for s in batch if s.computed < len(s.prompt)]:
            driving.step([(s, min(8, len(s.prompt) - s.computed)) for s in pending] + [(beside, 1)])
        for sequence in batch:
            expected = embedder.expected(sequence.prompt, kind, EmbeddingParams(), True)
            assert sequence.embedding is not None and sequence.embedding.tolist() == pytest.approx(expected.tolist(), abs=CLOSE)
            assert sequence.output == [0], "an embedding row must report token 0"
    driving.decode([beside], 12)
    assert beside.output == alone.output


def test_last_token_pooling_accepts_a_cached_prefix(embedder: Embedder, executor: DeviceExecutor) -> None:
    prefix = prompt_of(16)
    first, second = embedding(prefix + prompt_of(5, 1), 0), embedding(prefix + prompt_of(7, 2), 1)
    driving = driver(executor, PoolingConfig(PoolingKind.LAST, True))
    driving.prefill([first])
    second.pages, second.computed = first.pages[:4], 16
    driving.prefill([second], 4)
    expected = embedder.expected(second.prompt, PoolingKind.LAST, EmbeddingParams(), True)
    assert second.embedding is not None and second.embedding.tolist() == pytest.approx(expected.tolist(), abs=CLOSE)


# Without a model


def empty_plan() -> BatchPlan:
    return Driver(FakeExecutor(8, 4, MAX_SLOTS, 8, 257), 4).plan([])


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_row_with_a_vector_that_is_not_finite_gets_a_fault(kind: PoolingKind) -> None:
    plan = replace(
        empty_plan(), num_extend=2, slots=i32([4, 5]), starts=i32([0, 0]), num_tokens=i32([1, 1]),
        input_ids=i32([1, 2]), sample=np.array([True, True]),
    )  # fmt: skip
    pool = EmbeddingPool(PoolingConfig(kind, True))
    for slot in (4, 5):
        pool.admit(SlotParams(slot, 1, SamplingParams(1, embedding=EmbeddingParams()), (), i32([])))
    states = torch.tensor([[1.0, 0.0], [torch.nan, 1.0]])
    vectors, faults = finite_vectors(pool.pool(plan, lambda wanted: states[wanted]))
    assert faults == {1: RowFault.NAN_LOGITS} and list(vectors) == [0]


def test_mean_pooling_sums_chunks_in_float32() -> None:
    pool, count = EmbeddingPool(PoolingConfig(PoolingKind.MEAN, False)), 4096
    pool.admit(SlotParams(0, count, SamplingParams(1, embedding=EmbeddingParams()), (), i32([])))
    plan = replace(
        empty_plan(), num_extend=1, slots=i32([0]), starts=i32([0]), num_tokens=i32([1]), input_ids=i32([1])
    )  # fmt: skip
    state = torch.tensor([[1.0, 0.1]], dtype=torch.bfloat16)
    for start in range(count):
        step = replace(plan, starts=i32([start]), sample=np.array([start == count - 1]))
        vectors, _ = finite_vectors(pool.pool(step, lambda wanted: state[wanted]))
    assert vectors[0].tolist() == pytest.approx(state[0].tolist(), rel=1e-5)
