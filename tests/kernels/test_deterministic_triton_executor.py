"""Checks deterministic mode with Triton kernels only: a prompt gets the same ids and logprob bits in any context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.kernels.triton.attention import attention_plan
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup, CacheKind
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.attention import triton_backend
from rootstock_llm.services.worker.exec.attention.triton_backend import TritonAttention
from rootstock_llm.services.worker.exec.build import DeviceParts, assemble_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.step.idle_steps import StepBounds
from rootstock_llm.services.worker.exec.warm_up import warm_up
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest, LoadTarget
from rootstock_llm.services.worker.exec.weights.weight_stream import StreamOptions, stream_weights
from tests.exec.always_guessing import now_and_then
from tests.exec.device_executors import options_for
from tests.exec.guesses import Guesses
from tests.exec.random_contexts import World, alone, strings, targets
from tests.exec.test_speculation import guess_with
from tests.exec.tiny_models import QWEN35, TinyModel
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


# A recurrent layer, and a layer with attention.
HYBRID = TinyModel(
    "Qwen3_5",
    {**QWEN35, "vocab_size": 67, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 64}
    | {"layer_types": ["linear_attention", "full_attention"]},
    config="Qwen3_5TextConfig",
)


def made_of(
    model: TinyModel,
    folder: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    max_drafts: int = 0,
    context_len: int = WORLD.context_len,
) -> DeviceExecutor:
    def weights(checkpoint: Any, read: Any, dtype: Any, kernels: Any, progress: Any, phases: Any, quantization: Any) -> Any:
        return stream_weights(
            checkpoint, read, dtype, device, kernels, StreamOptions(threads=1), progress, phases, quantization=quantization
        )

    products_in_order(monkeypatch)
    model.build(folder)
    target = LoadTarget(device, lambda _: TritonLayers(device, deterministic=True), weights, lambda *_: "one")
    loaded = load_model(LoadRequest(folder, "float32", WORLD.page_size, context_len, 1, lambda _: None, target=target))
    parts = DeviceParts(attention=lambda shape: TritonAttention(shape, device, deterministic=True))
    options = options_for(str(device), kernels="triton", max_tokens=64, deterministic=True, max_drafts=max_drafts)
    size, pages = WORLD.page_size, WORLD.num_pages
    made, _ = assemble_executor(loaded, WORLD.max_slots, size, pages, 0.5, options, lambda _: None, True, parts)
    return made


@pytest.fixture
def executor(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    made = made_of(MODEL, tmp_path, device, monkeypatch)
    yield made
    made.close()


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
def test_executor_gives_the_same_token_ids_and_logprob_bits_in_any_context(executor: Executor, number: int) -> None:
    target = list(targets(WORLD, random.Random(5), 11, 5))[number]
    assert len(strings(WORLD, executor, target, range(100 * number, 100 * number + CONTEXTS))) == 1


@pytest.mark.timeout(7200)
def test_drafting_changes_no_bit_of_an_answer_of_a_model_with_recurrent_layers(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftController, "choose", now_and_then())
    answers = []
    for max_drafts in (0, 3):
        executor = made_of(HYBRID, tmp_path / str(max_drafts), device, monkeypatch, max_drafts)
        groups = (CacheGroup(CacheKind.STATE, executor.runner.passes.pool.num_states),)
        world = replace(WORLD, max_drafts=max_drafts, groups=groups)
        target = next(targets(world, random.Random(5), 11, 9))
        if max_drafts:
            guesses = Guesses([[*target.prompt, *answers[0].tokens]], 0.3, WORLD.vocab_size)
            guess_with(executor, guesses)
        answers.append(alone(world, executor, target))
        executor.close()
    assert answers[0].bits() == answers[1].bits() and guesses.accepted > 0


def test_warm_up_launches_attention_of_one_and_of_several_splits_per_prompt_and_per_decode_row(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "FIXED_POSITIONS", 32)
    executor = made_of(MODEL, tmp_path, device, monkeypatch, context_len=48)
    run, launched = triton_backend.run_attention, set[tuple[bool, bool]]()

    def recorded(call: Any, shape: Any, launch: Any, scratch: Any) -> None:
        launched.add((launch.one_token, launch.splits > 0))
        run(call, shape, launch, scratch)

    monkeypatch.setattr(triton_backend, "run_attention", recorded)
    runner, bounds = executor.runner, StepBounds(max_tokens=64, max_slots=WORLD.max_slots, context_len=48, generates=True)

    def warmed() -> None:
        with runner.streams.on_forward():
            warm_up(runner, bounds, (1, 20), ends_context=True)

    runner.streams.collect(warmed)()
    executor.close()
    assert launched == {(False, False), (False, True), (True, False), (True, True)}
