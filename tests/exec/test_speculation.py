"""Draft tokens save steps and change no bit of token ids and log probabilities in deterministic mode, in any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.plan import I32, DryParams, SamplingParams, SlotParams
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.drafter import BETWEEN_TEXTS, Drafter
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorError
from rootstock_llm.services.worker.exec.drafting.ngram import NgramDrafter
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from tests.core.fake_grammar import spec
from tests.exec.always_guessing import always
from tests.exec.guesses import Guesses
from tests.exec.random_contexts import Asked, Turned, World, alone, answer_in, random_context, strings, targets
from tests.exec.tiny_models import TinyModel
from tests.exec.transformers_families import SERVED
from tests.night import NIGHTLY

CONTEXTS = 300 if NIGHTLY else 4  # contexts per kind of sampling
WORLD = World(max_drafts=4)
PROMPT_TOKENS, NEW_TOKENS = 45, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(made)
    return made


def made_of(folder: Path, max_drafts: int, dtype: str = "bfloat16", corpus: I32 | None = None) -> DeviceExecutor:
    options = DeviceOptions(device="cpu", num_threads=1, deterministic=True, max_drafts=max_drafts, draft_corpus=corpus)
    sizes = (WORLD.page_size, WORLD.max_slots, WORLD.num_pages, 0.5, WORLD.context_len)
    executor, info = build_device_executor(str(folder), dtype, *sizes, options, lambda _: None, check_relay=True)
    assert info.max_drafts == max_drafts
    return executor


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def executors(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[DeviceExecutor, DeviceExecutor]]:
    """Executors of one model: without drafting, with drafting."""
    plain, drafting = made_of(folder, 0, request.param), made_of(folder, 4, request.param)
    yield plain, drafting
    plain.close()
    drafting.close()


# Marks tests that do not depend on the dtype.
of_one_dtype_by_day = pytest.mark.parametrize(
    "executors", ["bfloat16", "float32"] if NIGHTLY else ["float32"], indirect=True, scope="module"
)


def guess_with(executor: DeviceExecutor, drafter: Drafter) -> None:
    executor._steps._drafter = drafter  # type: ignore[attr-defined]


def text_of(plain: DeviceExecutor, target: Asked) -> list[int]:
    return [*target.prompt, *alone(World(), plain, target).tokens]


@pytest.mark.by_day(one_in=3, seed=48)
@pytest.mark.parametrize("errors", [0.0, 0.4, 1.0], ids=["all right", "half right", "all wrong"])
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
def test_draft_tokens_change_no_bit_of_an_answer(
    executors: tuple[DeviceExecutor, DeviceExecutor], number: int, errors: float
) -> None:
    plain, drafting = executors
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    guesses = Guesses([text_of(plain, target)], errors, WORLD.vocab_size)
    guess_with(drafting, guesses)
    expected = strings(World(), plain, target, range(1))
    assert len(expected) == 1
    assert strings(WORLD, drafting, target, range(CONTEXTS * number, CONTEXTS * (number + 1))) == expected
    assert guesses.drafted > 0 and (guesses.accepted > 0) == (errors < 1.0)


def test_drafting_changes_no_bit_of_an_answer_with_dry_penalties(executors: tuple[DeviceExecutor, DeviceExecutor]) -> None:
    """Each accepted draft token continues a repetition, so that the tokens after it have other penalties."""
    plain, drafting = executors
    dry = DryParams(multiplier=2.0, allowed_length=1)
    target = Asked(
        (1, 2, 3, 4, 5) * 9, SamplingParams(NEW_TOKENS, temperature=0.8, seed=3, dry=dry, ignore_eos=True, top_logprobs=2)
    )
    guesses = Guesses([text_of(plain, target)], 0.0, WORLD.vocab_size)
    guess_with(drafting, guesses)
    assert strings(WORLD, drafting, target, range(2)) == strings(World(), plain, target, range(1))
    assert guesses.accepted > 0


@pytest.mark.parametrize("number", [0, 2], ids=["greedy", "penalties"])
def test_drafting_changes_no_bit_of_an_answer_with_a_grammar(folder: Path, number: int) -> None:
    """The grammar forces some tokens.

    If no log probabilities are requested, forced tokens are not sampled, and draft tokens at their positions are dropped.
    """
    plain, drafting = made_of(folder, 0), made_of(folder, 4)
    bound = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    sampled = replace(bound.params, grammar=spec(1, NEW_TOKENS))
    for params in (sampled, replace(sampled, top_logprobs=-1)):
        target = Asked(bound.prompt, params)
        expected = alone(World(), plain, target)
        guesses = Guesses([[*target.prompt, *expected.tokens]], 0.3, WORLD.vocab_size)
        guess_with(drafting, guesses)
        for seed in range(CONTEXTS):
            context = random_context(WORLD, seed, target, expected.tokens)
            answer, kept = answer_in(context, drafting), len(context.target.resumed)
            assert answer.tokens == expected.tokens[kept:]
            assert len(answer.logprobs) == (len(answer.tokens) if params is sampled else 0)
            assert params is not sampled or answer.bits() == expected.bits()[kept:]
        assert guesses.accepted > 0
    plain.close()
    drafting.close()


@of_one_dtype_by_day
def test_ngram_drafts_change_no_bit_of_an_answer(executors: tuple[DeviceExecutor, DeviceExecutor]) -> None:
    """The prompt is a text, the model's output for this text, and the text again. So the model repeats its output."""
    plain, drafting = executors
    guess_with(drafting, NgramDrafter())
    (first, *_) = targets(WORLD, random.Random(8), 20, NEW_TOKENS)
    output = alone(World(), plain, first).tokens
    target = Asked((*first.prompt, *output, *first.prompt), first.params)
    assert strings(WORLD, drafting, target, range(CONTEXTS)) == strings(World(), plain, target, range(1))


@of_one_dtype_by_day
def test_prediction_saves_steps_and_changes_no_bit_of_an_answer(
    executors: tuple[DeviceExecutor, DeviceExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests a right prediction, and a prediction with some wrong tokens."""
    plain, drafting = executors
    guess_with(drafting, NgramDrafter())
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[1]
    plain_output = alone(World(), plain, target).tokens
    edited = (*plain_output[:7], 3, 4, 5, *plain_output[9:20], *plain_output[23:])
    expected = strings(World(), plain, target, range(1))
    assert strings(WORLD, drafting, replace(target, prediction=edited), range(CONTEXTS)) == expected
    monkeypatch.setattr(DraftController, "choose", always)
    verified = alone(WORLD, drafting, replace(target, prediction=tuple(plain_output))).verified
    rows = -(-(NEW_TOKENS - 1) // 5)
    assert (verified.rows, verified.drafted) == (rows, NEW_TOKENS - 1 - rows)
    assert verified.predicted == verified.right_predicted == verified.accepted == verified.drafted
    partly = alone(WORLD, drafting, replace(target, prediction=edited)).verified
    assert 0 < partly.right_predicted < partly.predicted <= partly.drafted
    assert alone(WORLD, drafting, target).verified.predicted == 0


def test_corpus_saves_steps_and_changes_no_bit_of_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus includes token ids outside of the model's vocabulary."""
    monkeypatch.setattr(DraftController, "choose", always)
    target = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    plain = made_of(folder, 0, "float32")
    plain_run = alone(World(), plain, target)
    plain.close()
    text = [
        *target.prompt[-3:],
        *plain_run.tokens[:9],
        WORLD.vocab_size,
        *plain_run.tokens[9:20],
        BETWEEN_TEXTS,
        *plain_run.tokens[20:],
    ]
    corpus = np.array(text, dtype=np.int32)
    drafting = made_of(folder, 4, "float32", corpus)
    answer = alone(WORLD, drafting, target)
    drafting.close()
    assert answer.bits() == plain_run.bits()
    assert answer.verified.accepted > NEW_TOKENS // 2 and answer.verified.predicted == 0
    assert int(corpus.max()) < WORLD.vocab_size, (
        "unknown ids must be replaced in place, because a copy of the corpus would stay in memory"
    )


@of_one_dtype_by_day
def test_request_without_drafting_gets_no_draft_tokens(
    executors: tuple[DeviceExecutor, DeviceExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other request of the batch gets draft tokens. The drafter must get no calls for the request that has opted out."""
    monkeypatch.setattr(DraftController, "choose", always)
    plain, drafting = executors
    target = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    guesses = Guesses([text_of(plain, target)], 0.0, WORLD.vocab_size)
    guess_with(drafting, guesses)
    turned = Turned(WORLD.config(), drafting, overlap=True)
    opted_out = replace(target, params=replace(target.params, speculative=False))
    without, beside = turned.submit(opted_out), turned.submit(target)
    turned.finish()
    assert without.bits() == beside.bits() == alone(World(), plain, target).bits()
    assert without.verified.rows == 0 < beside.verified.accepted == guesses.accepted
    assert len(guesses._texts) == 1


@of_one_dtype_by_day
def test_correct_draft_tokens_save_steps(
    executors: tuple[DeviceExecutor, DeviceExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftController, "choose", always)
    plain, drafting = executors
    target = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    text = text_of(plain, target)
    steps = {}
    for errors in (0.0, 1.0):
        guess_with(drafting, Guesses([text], errors, WORLD.vocab_size))
        before = drafting.runner.stats.eager_steps
        assert [*target.prompt, *alone(WORLD, drafting, target).tokens] == text
        steps[errors] = drafting.runner.stats.eager_steps - before
    assert (steps[0.0], steps[1.0]) == (1 + -(-(NEW_TOKENS - 1) // 5), NEW_TOKENS)


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("name", ["gpt2", "gemma2-dynamic-rope", "qwen2-moe"])
def test_models_of_transformers_give_the_same_tokens_with_and_without_drafts(name: str, tmp_path: Path) -> None:
    """Compares only greedy tokens in float32, because more rows may change the rounding of sums."""
    SERVED[name].build(tmp_path)
    target = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    outputs, text = [], list(target.prompt)
    for max_drafts in (0, 4):
        options = DeviceOptions(device="cpu", num_threads=1, max_drafts=max_drafts)
        sizes = (WORLD.page_size, WORLD.max_slots, WORLD.num_pages, 0.5, WORLD.context_len)
        executor, _ = build_device_executor(str(tmp_path), "float32", *sizes, options, lambda _: None, check_relay=True)
        if max_drafts:
            guesses = Guesses([[*text, *outputs[0]]], 0.3, WORLD.vocab_size)
            guess_with(executor, guesses)
        outputs.append(alone(replace(WORLD, max_drafts=max_drafts), executor, target).tokens)
        executor.close()
    assert outputs[0] == outputs[1] and guesses.accepted > 0


def test_drafting_changes_no_bit_of_an_answer_when_steps_are_computed_in_pieces(folder: Path) -> None:
    """The prompts have more tokens than a forward pass may have, and share steps with decode rows."""
    results = []
    for max_drafts, max_tokens in ((0, 512), (4, 16)):
        options = DeviceOptions(device="cpu", num_threads=1, deterministic=True, max_drafts=max_drafts, max_tokens=max_tokens)
        sizes = (WORLD.page_size, WORLD.max_slots, WORLD.num_pages, 0.5, WORLD.context_len)
        executor, _ = build_device_executor(str(folder), "float32", *sizes, options, lambda _: None, check_relay=True)
        world, answers = replace(WORLD, max_drafts=max_drafts), []
        for target in targets(world, random.Random(5), PROMPT_TOKENS, NEW_TOKENS):
            if max_drafts:
                guess_with(executor, Guesses([[*target.prompt, *results[0][len(answers)][0]]], 0.3, WORLD.vocab_size))
            context = random_context(replace(world, chunks=(0,), few_pages=WORLD.num_pages), 4, target, list(range(9, 20)))
            mixed = replace(context.config, enable_mixed_chunk=True, retract_interval=0)
            late = (7, Asked(target.prompt[:1] * 40, target.params))
            answer = answer_in(replace(context, config=mixed, target=target, at=0, arrivals=(late,)), executor)
            answers.append((answer.tokens, answer.bits()))
        results.append(answers)
        assert (executor.runner.stats.pieces > 0) == (max_tokens == 16)
        executor.close()
    assert results[0] == results[1]


@of_one_dtype_by_day
def test_failed_step_leaves_no_state_for_the_next_request(
    executors: tuple[DeviceExecutor, DeviceExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of the failed step end, and the next request must get its usual tokens."""
    plain, drafting = executors
    target = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    guess_with(drafting, Guesses([text_of(plain, target)], 0.0, WORLD.vocab_size))
    sampler = drafting.runner.sampler

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "launch", broken)
        with pytest.raises(ExecutorError, match="no kernel"):
            alone(WORLD, drafting, target)
    assert not drafting._steps._steps  # type: ignore[attr-defined]
    assert alone(WORLD, drafting, target).bits() == alone(World(), plain, target).bits()


def slot_of(history: Sequence[int]) -> SlotParams:
    return SlotParams(0, len(history), SamplingParams(max_new_tokens=9), (), np.array(history, dtype=np.int32))


def test_ngram_drafter_proposes_the_last_continuation() -> None:
    drafter = NgramDrafter()
    drafter.admit(slot_of([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 9, 2, 3]))
    assert drafter.propose({0: 3})[0] == [7, 8, 9], "the draft must be the tokens after the last 9 2 3"
    drafter.sampled(0, [4])
    assert drafter.propose({0: 2})[0] == [5, 9], "the draft must be the tokens after 2 3 4"
    drafter.sampled(0, [6, 6])
    assert drafter.propose({0: 4})[0] == [], "no token follows 6 6"
    drafter.set_tokens(0, 2, [1, 2])
    assert drafter.propose({0: 2})[0] == [1, 2], "the tokens after position 4 were removed"


@of_one_dtype_by_day
def test_drafting_pauses_while_drafts_are_wrong_and_resumes_when_drafts_are_right(
    executors: tuple[DeviceExecutor, DeviceExecutor],
) -> None:
    plain, drafting = executors
    target = next(targets(WORLD, random.Random(5), 5, 200))
    text = text_of(plain, target)
    guesses = Guesses([text], 1.0, WORLD.vocab_size)
    guess_with(drafting, guesses)
    turned = Turned(WORLD.config(), drafting, overlap=False)
    answer = turned.submit(target)
    while len(answer.tokens) < 100:
        turned.turn()
    assert 0 < guesses.drafted <= 4 * 7, "after four misses in a row, drafting must pause for 16, 32 and 64 steps"
    guesses._errors = 0.0
    while not turned.idle:
        turned.turn()
    assert guesses.accepted > 10 and [*target.prompt, *answer.tokens] == text
