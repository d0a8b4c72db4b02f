"""Checks deterministic mode with Triton kernels only: a prompt gets the same ids and logprob bits in any context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from rootstock_llm.services.worker.exec.attention.triton_backend import TritonAttention
from rootstock_llm.services.worker.exec.build import DeviceParts, assemble_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest, LoadTarget
from rootstock_llm.services.worker.exec.weights.weight_stream import StreamOptions, stream_weights
from tests.exec.device_executors import options_for
from tests.exec.random_contexts import World, strings, targets
from tests.exec.tiny_models import TinyModel
from tests.kernels.ordered_products import products_in_order
from tests.night import NIGHTLY

CONTEXTS = 34 if NIGHTLY else 1  # contexts per way of sampling
WORLD = World(
    vocab_size=67,
    context_len=32,
    max_slots=4,
    num_pages=40,
    few_pages=16,
    mates=4,
    turns=6,
    mate_prompts=(1, 3, 9),
    mate_tokens=4,
    chunks=(0, 4, 8),
)
MODEL = TinyModel("Qwen3", {"vocab_size": 67, "num_hidden_layers": 1, "head_dim": 16, "max_position_embeddings": 64})


@pytest.fixture
def executor(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    def weights(checkpoint: Any, read: Any, dtype: Any, kernels: Any, progress: Any, phases: Any) -> Any:
        return stream_weights(checkpoint, read, dtype, device, kernels, StreamOptions(threads=1), progress, phases)

    products_in_order(monkeypatch)
    MODEL.build(tmp_path)
    target = LoadTarget(device, lambda _: TritonLayers(device, deterministic=True), weights, lambda *_: "one")
    loaded = load_model(LoadRequest(tmp_path, "float32", WORLD.page_size, WORLD.context_len, 1, lambda _: None, target=target))
    parts = DeviceParts(attention=lambda shape: TritonAttention(shape, device, deterministic=True))
    options = options_for(str(device), kernels="triton", max_tokens=64, deterministic=True)
    size, pages = WORLD.page_size, WORLD.num_pages
    made, _ = assemble_executor(loaded, WORLD.max_slots, size, pages, 0.5, options, lambda _: None, True, parts)
    yield made
    made.close()


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
def test_executor_gives_the_same_token_ids_and_logprob_bits_in_any_context(executor: Executor, number: int) -> None:
    target = list(targets(WORLD, random.Random(5), 11, 5))[number]
    assert len(strings(WORLD, executor, target, range(100 * number, 100 * number + CONTEXTS))) == 1
