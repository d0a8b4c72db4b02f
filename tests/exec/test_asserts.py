"""Seeds faults that a change of the code could introduce. Each fault must fail an assert of the product."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.services.worker.core.contracts.plan import DryParams, EmbeddingParams, SamplingParams
from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolSizes
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.exec.fake import FakeExecutor, _apply_table
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.models.rope import rope_table
from rootstock_llm.services.worker.exec.pools.embedding_pool import EmbeddingPool, PoolingConfig, PoolingKind
from rootstock_llm.services.worker.exec.pools.kv_pool import allocate
from rootstock_llm.services.worker.exec.sampling.dry import Repeats
from rootstock_llm.services.worker.exec.weights.source import WeightReader
from tests.core.seeded_faults import Fault, law_broken
from tests.core.test_scheduler_basic import make
from tests.exec.driver import Driver, Sequence
from tests.exec.host_executors import load_request
from tests.exec.tiny_models import MODELS

Scenario = Callable[[Path], bool]  # runs the code on a model folder and returns whether the result is right
PAGE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    MODELS["qwen3"].build(made)
    return made


def served(_: Path) -> bool:
    """Serves requests with chunked prompts, with the core and the fake executor."""
    engine = make()
    engine.checked = False
    for handle in range(6):
        engine.submit(handle, [handle + 1] * 21, max_new_tokens=9, ignore_eos=True)
    engine.drain()
    return all(engine.outputs[handle] == engine.expected(handle) for handle in range(6))


def computed(folder: Path) -> bool:
    """Computes five tokens of one sequence with a decoder that is loaded as in a worker."""
    loaded = load_model(load_request(folder, "float32", PAGE, 32))
    pool = allocate(loaded.layers, PoolSizes(2), PAGE, loaded.dtype, loaded.kernels)
    positions = torch.arange(5, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    rows = RaggedRows(torch.tensor([[0, 1]], dtype=torch.int32), one, one, one + 5, one, positions, positions.long(), 5)
    with torch.inference_mode():
        loaded.model.forward(torch.arange(5), rows, pool)
        return bool(loaded.model.logits(torch.tensor([4])).isfinite().all())


def embedded(_: Path) -> bool:
    """Pools a prompt to its mean in three chunks."""
    pool = EmbeddingPool(PoolingConfig(PoolingKind.MEAN, False))
    driver = Driver(FakeExecutor(8, PAGE, 4, 8, 1000), PAGE)
    sequence = Sequence(list(range(12)), 0, SamplingParams(max_new_tokens=1, embedding=EmbeddingParams()))
    states = torch.arange(12.0)[:, None]
    for first in (0, 4, 8):
        plan = driver.plan([(sequence, 4)])
        for slot in plan.admitted:
            pool.admit(slot)
        vectors = pool.pool(plan, states[first : first + 4].__getitem__)
    return bool(vectors[0].tolist() == [5.5])


def repeated(_: Path) -> bool:
    """Adds more tokens to the repetition index of DRY than its first allocation has memory for."""
    repeats = Repeats(DryParams(1.0), np.array([1, 2, 3] * 3))
    for token in [1, 2, 3] * 200:
        repeats.add(token)
    return bool(repeats.penalties()[0].tolist() == [1])


FAULTS: list[tuple[Fault, Scenario]] = [
    (
        Fault(
            "a table update adds only one page",
            _apply_table,
            "np.repeat(slots, counts), np",
            "slots, np",
            "an entry for each index",
        ),
        served,
    ),
    (
        Fault(
            "an extend row begins at a token of another row",
            FakeExecutor.forward,
            "at += count",
            "at += 1",
            "each position of an extend row",
        ),
        served,
    ),
    (
        Fault(
            "the core adds pages to a table without recording them for a plan",
            KVMemory.grow,
            "self._writes.add(slot, have, pages)",
            "pass",
            "only to pages in the page table",
        ),
        served,
    ),
    (
        Fault(
            "the value projection is not loaded",
            WeightReader.matrix,
            "size, in_features)) for name, size in names]",
            "size, in_features)) for name, size in names[:2]]",
            "one after the other",
        ),
        computed,
    ),
    (
        Fault(
            "angles for every dimension",
            rope_table,
            "_base_frequencies(rope, rotary_dim)",
            "_base_frequencies(rope, 2 * rotary_dim)",
            "pair of dimensions",
        ),
        computed,
    ),
    (
        Fault(
            "the end of a chunk is relative to the chunk, not to the prompt",
            EmbeddingPool.pool,
            "pooled.end = int(plan.starts[row]) + last",
            "pooled.end = last",
            "leaves no token out|no position counts twice",
        ),
        embedded,
    ),
    (
        Fault(
            "the arrays do not grow when they are full",
            Repeats.add,
            "self._size == len(self._tokens)",
            "self._size > len(self._tokens)",
            "the arrays have a free element",
        ),
        repeated,
    ),
]


@pytest.mark.parametrize("scenario", [served, computed, embedded, repeated])
def test_scenario_passes_when_no_fault_is_seeded(scenario: Scenario, folder: Path) -> None:
    assert scenario(folder)


@pytest.mark.parametrize(("fault", "scenario"), FAULTS, ids=[fault.name for fault, _ in FAULTS])
def test_seeded_fault_violates_an_assertion(fault: Fault, scenario: Scenario, folder: Path) -> None:
    assert re.search(fault.law, law_broken(fault, lambda: scenario(folder)))
