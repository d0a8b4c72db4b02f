"""Tests deterministic mode on a device: a prompt gives equal bits in any context, with and without CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from tests.exec.device_executors import executor_of
from tests.exec.random_contexts import World, strings, targets
from tests.exec.tiny_models import TinyModel

CONTEXTS = 100  # number of random contexts per kind of sampling
# The matrix product of the LM head has one program per block of columns. The products of the layers are split.
WORLD = World(vocab_size=32_800)
MODEL = TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 640, "vocab_size": WORLD.vocab_size})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    MODEL.build(folder)
    return folder


def made_of(folder: Path, device: str, dtype: str, **options: Any) -> Executor:
    sizes = {"page_size": WORLD.page_size, "max_slots": WORLD.max_slots, "num_pages": WORLD.num_pages}
    return executor_of(folder, device, **sizes, context_len=WORLD.context_len, dtype=dtype, **options)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def executors(request: pytest.FixtureRequest, folder: Path, device: str) -> Iterator[tuple[Executor, Executor]]:
    """An executor with CUDA graphs, and one without."""
    with_graphs, without = (
        made_of(folder, device, request.param, deterministic=True, cuda_graphs=graphs) for graphs in (True, False)
    )
    yield with_graphs, without
    with_graphs.close()
    without.close()


@pytest.mark.by_day(one_in=6)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
def test_request_gets_the_same_bits_in_all_contexts_with_and_without_graphs(
    executors: tuple[Executor, Executor], number: int
) -> None:
    target = list(targets(WORLD, random.Random(5), 45, 30))[number]
    results = [strings(WORLD, executor, target, range(number, 3 * CONTEXTS, 3)) for executor in executors]
    assert results[0] == results[1] and len(results[0]) == 1


def test_bits_differ_between_contexts_without_deterministic_mode(folder: Path, device: str) -> None:
    executor = made_of(folder, device, "bfloat16")
    found = [len(strings(WORLD, executor, target, range(40))) for target in targets(WORLD, random.Random(5), 45, 30)]
    assert max(found) > 1
    executor.close()
