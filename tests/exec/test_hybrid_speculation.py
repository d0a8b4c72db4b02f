"""Draft tokens of models with windows or recurrent layers: results have the bits of results without draft tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.reference import sampling as sampling_twin
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.build import DeviceOptions, DeviceParts, build_device_executor
from rootstock_llm.services.worker.exec.drafting.ngram import NgramDrafter
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.kernel_set import KernelSet
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel
from tests.core.fake_grammar import spec
from tests.exec.always_guessing import always, now_and_then
from tests.exec.device_doubles import GraphMemoryDouble, Watch, WatchedKernels
from tests.exec.draft_folders import write_eagle3
from tests.exec.guesses import Guesses
from tests.exec.late_streams import LateStreams
from tests.exec.random_contexts import Answer, Asked, Turned, World, alone, answer_in, random_context, strings, targets
from tests.exec.test_device_graphs import CapturableTorch, WatchedAttention
from tests.exec.test_speculation import guess_with
from tests.exec.tiny_models import MODELS
from tests.night import NIGHTLY

CONTEXTS = 100 if NIGHTLY else 3  # contexts per kind of sampling
WORLD = World(max_drafts=4)
PROMPT_TOKENS, NEW_TOKENS = 45, 30


@dataclass(frozen=True)
class Pair:
    """Two executors of one model, with the sizes of their workers."""

    plain: DeviceExecutor
    drafting: DeviceExecutor
    plain_world: World
    world: World  # of the executor with drafting
    dtype: str


def made_of(
    folder: Path, world: World, dtype: str, max_tokens: int = 512, parts: DeviceParts | None = None, **more: Any
) -> tuple[DeviceExecutor, World]:
    """Builds an executor. `more` has further fields of DeviceOptions. Returns the executor, and `world` with its cache groups."""
    options = DeviceOptions(device="cpu", num_threads=1, deterministic=True, max_drafts=world.max_drafts, max_chunk=256)
    options = replace(options, max_tokens=max_tokens, **more)
    sizes = (world.page_size, world.max_slots, world.num_pages, 0.5, world.context_len)
    executor, info = build_device_executor(str(folder), dtype, *sizes, options, lambda _: None, True, parts)
    return executor, replace(world, groups=info.groups)


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5-window", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    MODELS[request.param].build(made)
    return made


@pytest.fixture(scope="module", params=["bfloat16", "float32"] if NIGHTLY else ["bfloat16"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    (plain, plain_world), (drafting, world) = (made_of(folder, each, request.param) for each in (World(), WORLD))
    assert world.groups and [group.kind for group in world.groups] == [group.kind for group in plain_world.groups]
    yield Pair(plain, drafting, plain_world, world, request.param)
    plain.close()
    drafting.close()


def drafts_of(pair: Pair, target: Asked, errors: float) -> tuple[Answer, Guesses]:
    """Makes the executor draft the target's own output, with errors. Returns the output without drafts, and the drafter."""
    expected = alone(pair.plain_world, pair.plain, target)
    guesses = Guesses([[*target.prompt, *expected.tokens]], errors, WORLD.vocab_size)
    guess_with(pair.drafting, guesses)
    return expected, guesses


@pytest.mark.by_day(one_in=3, seed=7)
@pytest.mark.parametrize("steps", ["all", "third"])
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
def test_draft_tokens_change_no_bit_of_an_answer(pair: Pair, number: int, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step or every third step has draft tokens, about a third of which are wrong."""
    monkeypatch.setattr(DraftController, "choose", always if steps == "all" else now_and_then())
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    expected, guesses = drafts_of(pair, target, 0.3)
    seeds = range(CONTEXTS * number, CONTEXTS * (number + 1))
    assert strings(pair.world, pair.drafting, target, seeds) == {expected.bits()}
    assert 0 < guesses.accepted < guesses.drafted


@pytest.mark.by_day(one_in=2, seed=3)
def test_drafting_changes_no_bit_of_an_answer_with_a_grammar(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar forces some tokens, so that rows in flight are dropped and their states are undone."""
    bound = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    sampled = replace(bound.params, grammar=spec(1, NEW_TOKENS))
    for params, choose in ((sampled, now_and_then()), (replace(sampled, top_logprobs=-1), always)):
        monkeypatch.setattr(DraftController, "choose", choose)
        target = Asked(bound.prompt, params)
        expected, guesses = drafts_of(pair, target, 0.3)
        for seed in range(CONTEXTS):
            context = random_context(pair.world, seed, target, expected.tokens)
            answer, kept = answer_in(context, pair.drafting), len(context.target.resumed)
            assert answer.tokens == expected.tokens[kept:]
            assert params is not sampled or answer.bits() == expected.bits()[kept:]
        assert guesses.accepted > 0


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_ngram_drafts_change_no_bit_of_an_answer_when_the_request_is_retracted(pair: Pair, overlap: bool) -> None:
    """The client predicts the output, with wrong tokens in two places."""
    guess_with(pair.drafting, NgramDrafter())
    target = next(targets(WORLD, random.Random(8), 20, NEW_TOKENS))
    expected = alone(pair.plain_world, pair.plain, target)
    predicted = (*expected.tokens[:7], 3, 4, *expected.tokens[9:20], *expected.tokens[23:])
    target = replace(target, prediction=predicted)
    turned = Turned(pair.world.config(retract_interval=5, speculative_adaptive=False), pair.drafting, overlap)
    answers = [turned.submit(target) for _ in range(3)]
    turned.finish()
    assert [answer.bits() for answer in answers] == [expected.bits()] * 3
    assert sum(answer.verified.accepted for answer in answers) > 0


def test_drafting_changes_no_bit_of_an_answer_when_steps_are_computed_in_pieces(
    folder: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts have more tokens than a forward pass may have, and share steps with decode rows."""
    monkeypatch.setattr(DraftController, "choose", always)
    executor, world = made_of(folder, WORLD, pair.dtype, max_tokens=16)
    target = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    expected = alone(pair.plain_world, pair.plain, target)
    guess_with(executor, Guesses([[*target.prompt, *expected.tokens]], 0.3, WORLD.vocab_size))
    context = random_context(replace(world, chunks=(0,), few_pages=WORLD.num_pages), 4, target, list(range(9, 20)))
    mixed = replace(context.config, enable_mixed_chunk=True, retract_interval=0)
    late = (7, Asked(target.prompt[:1] * 40, target.params))
    answer = answer_in(replace(context, config=mixed, target=target, at=0, arrivals=(late,)), executor)
    assert answer.bits() == expected.bits() and executor.runner.stats.pieces > 0
    executor.close()


def test_draft_tokens_change_no_bit_of_an_answer_on_a_slow_device(
    pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftController, "choose", now_and_then())
    executor, world = made_of(folder, WORLD, pair.dtype, parts=DeviceParts(streams=LateStreams()))
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[2]
    expected = alone(pair.plain_world, pair.plain, target)
    guesses = Guesses([[*target.prompt, *expected.tokens]], 0.3, WORLD.vocab_size)
    guess_with(executor, guesses)
    assert strings(world, executor, target, range(CONTEXTS)) == {expected.bits()} and guesses.accepted > 0


@pytest.mark.parametrize("folder", ["gemma3"], indirect=True, scope="module")
def test_draft_tokens_change_no_token_of_a_model_with_windows_when_graphs_verify_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftController, "choose", always)
    watch = Watch()
    layers, sampling = WatchedKernels(reference, watch), WatchedKernels(sampling_twin, watch)
    parts = DeviceParts(
        streams=LateStreams(watch),
        kernels=KernelSet(layers, sampling),  # type: ignore[arg-type]
        attention=lambda _: WatchedAttention(CapturableTorch(reference), watch),
        graph_memory=GraphMemoryDouble(watch),  # type: ignore[arg-type]
        eager_cost=1.0,
    )
    sizes = (WORLD.page_size, 6, WORLD.num_pages, 0.5, WORLD.context_len)
    outputs, guesses = [], Guesses([], 0.3, WORLD.vocab_size)
    for max_drafts, given in ((0, None), (4, parts)):
        options = DeviceOptions(device="cpu", num_threads=1, max_graph_rows=8, max_tokens=64, max_drafts=max_drafts)
        executor, info = build_device_executor(str(folder), "float32", *sizes, options, lambda _: None, True, given)
        world = replace(WORLD, max_slots=6, max_drafts=max_drafts, groups=info.groups)
        target = next(targets(world, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
        if max_drafts:
            guesses = Guesses([[*target.prompt, *outputs[0]]], 0.3, WORLD.vocab_size)
            guess_with(executor, guesses)
        before = replace(executor.runner.stats)
        outputs.append(alone(world, executor, target).tokens)
    assert outputs[0] == outputs[1] and guesses.accepted > 0
    assert executor.runner.stats.eager_steps == before.eager_steps + 1, "only the step with the prompt runs without a graph"


@pytest.mark.parametrize("folder", ["qwen3.5-window"], indirect=True, scope="module")
@pytest.mark.parametrize("algorithm", ["draft", "eagle3"])
def test_draft_models_change_no_bit_of_an_answer(
    pair: Pair, folder: Path, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The separate draft model has windows. Its KV is in pages at full length, beside window units and states of the target."""
    monkeypatch.setattr(DraftController, "choose", always)
    if algorithm == "draft":
        MODELS["gemma3"].build(tmp_path / "drafter")
    else:
        write_eagle3(tmp_path / "drafter", folder, draft_vocab=100)
    given = {"speculative_algorithm": algorithm, "draft_model": str(tmp_path / "drafter")}
    executor, world = made_of(folder, replace(WORLD, drafts_by_model=True), pair.dtype, **given)
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[1]
    expected = alone(pair.plain_world, pair.plain, target)
    assert strings(world, executor, target, range(2)) == {expected.bits()}
    assert alone(world, executor, target).verified.drafted > 0
    executor.close()


def test_draft_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    MODELS["qwen3"].build(tmp_path / "target")
    MODELS["qwen3.5"].build(tmp_path / "drafter")
    with pytest.raises(UnsupportedModel, match="cannot draft: it has recurrent layers"):
        made_of(tmp_path / "target", WORLD, "float32", speculative_algorithm="draft", draft_model=str(tmp_path / "drafter"))
