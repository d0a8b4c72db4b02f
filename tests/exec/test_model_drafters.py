"""Draft models do not change the output, and draft the tokens that they would draft after one pass over the whole text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.core.planning import draft_controller
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.drafter import Computed
from rootstock_llm.services.worker.exec.contracts.operations import ReleaseMemory, ResumeMemory
from rootstock_llm.services.worker.exec.contracts.protocol import Run
from rootstock_llm.services.worker.exec.drafting.model_drafter import _DrafterSlot
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from tests.exec.always_guessing import always, now_and_then
from tests.exec.draft_folders import add_mtp, write_eagle3
from tests.exec.draft_reference import HeadReference, small_guesses
from tests.exec.random_contexts import Turned, World, alone, strings, targets
from tests.exec.tiny_models import TinyModel
from tests.night import NIGHTLY

CONTEXTS = 300 if NIGHTLY else 3
WORLD = World(max_drafts=3)
PROMPT_TOKENS, NEW_TOKENS = 45, 30
TARGET = TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128})
KINDS = ("itself", "another", "eagle3", "mtp", "mtp-deepseek")


def made_of(folder: Path, algorithm: str = "none", draft: str = "", max_tokens: int = 8192) -> DeviceExecutor:
    options = DeviceOptions(
        device="cpu",
        num_threads=1,
        deterministic=True,
        max_tokens=max_tokens,
        max_drafts=WORLD.max_drafts if algorithm != "none" else 0,
        speculative_algorithm=algorithm,
        draft_model=draft,
    )
    sizes = (WORLD.page_size, WORLD.max_slots, WORLD.num_pages, 0.5, WORLD.context_len)
    executor, _ = build_device_executor(str(folder), "float32", *sizes, options, lambda _: None, check_relay=True)
    return executor


@dataclass(frozen=True)
class Drafting:
    """Two executors of one target model, and a reference of the draft model."""

    kind: str  # one of KINDS
    plain: DeviceExecutor  # without drafting
    executor: DeviceExecutor  # with the draft model
    guesses: Callable[[Sequence[int], int], list[int]]  # returns the expected draft tokens after a text (draft_reference.py)


@pytest.fixture(scope="module", params=KINDS)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    folder, kind = tmp_path_factory.mktemp("model"), request.param
    target, draft = folder / "target", folder / "draft"
    TARGET.build(target)
    algorithm, path = "draft", ""
    if kind == "itself":
        path = str(target)
    elif kind == "another":
        TinyModel("Llama", {"num_hidden_layers": 1}).build(draft)
        path = str(draft)
    elif kind == "eagle3":
        write_eagle3(draft, target, draft_vocab=100)
        algorithm, path = "eagle3", str(draft)
    else:
        add_mtp(target, deepseek=kind == "mtp-deepseek")
        algorithm = "mtp"
    plain, executor = made_of(target), made_of(target, algorithm, path)
    if algorithm == "draft":
        yield Drafting(kind, plain, executor, partial(small_guesses, Path(path)))
    else:
        yield Drafting(kind, plain, executor, HeadReference(target, draft if path else None).guesses)
    plain.close()
    executor.close()


@pytest.mark.by_day(one_in=3, seed=33)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
def test_answers_have_the_same_bits_as_answers_of_an_executor_without_drafts(drafting: Drafting, number: int) -> None:
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    expected = strings(World(), drafting.plain, target, range(1))
    assert len(expected) == 1
    assert strings(WORLD, drafting.executor, target, range(CONTEXTS * number, CONTEXTS * (number + 1))) == expected


@pytest.mark.by_day(one_in=2, seed=15)
def test_answers_have_the_same_bits_as_without_drafts_when_few_requests_get_drafts(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with and without drafts take over each other's slots, pages and cached prefixes."""
    monkeypatch.setattr(draft_controller, "FUTILE", 2.0)
    target = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    expected = strings(World(), drafting.plain, target, range(1))
    drafted_for: list[bool] = []
    forward = drafting.executor.forward

    def record(plan: BatchPlan) -> Run:
        drafted_for.extend(slot.drafted_for for slot in plan.admitted)
        return forward(plan)

    monkeypatch.setattr(drafting.executor, "forward", record)
    world = replace(WORLD, drafts_by_model=True)
    assert strings(world, drafting.executor, target, range(CONTEXTS, 2 * CONTEXTS)) == expected
    assert 0 < sum(drafted_for) < len(drafted_for)


@pytest.mark.by_day(one_in=3, seed=18)
@pytest.mark.parametrize(
    ("number", "chunk", "resting"),
    [(0, 0, False), (0, 8, False), (1, 20, True)],
    ids=["whole", "chunks of 8", "top-p, chunks of 20, drafting in some steps"],
)
def test_draft_tokens_equal_the_draft_tokens_of_one_pass_over_the_whole_text(
    drafting: Drafting, number: int, chunk: int, resting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers any number of accepted tokens, and steps without drafting."""
    monkeypatch.setattr(DraftController, "choose", now_and_then() if resting else always)
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    drafter = drafting.executor._steps._drafter  # type: ignore[attr-defined]
    proposed: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def record(wanted: dict[int, int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = propose(wanted)
        proposed.extend((list(drafter._slots[slot].text), guess) for slot, guess in found.items())
        return found

    drafter._due_slots.clear()  # left by the requests of the last test
    entries: list[int] = []
    forward = drafter.model.forward

    def counted(ids: Tensor, *others: Any) -> None:
        entries.append(len(ids))
        forward(ids, *others)

    monkeypatch.setattr(drafter, "propose", record)
    monkeypatch.setattr(drafter.model, "forward", counted)
    turned = Turned(WORLD.config(chunked_prefill_size=chunk, enable_radix_cache=False), drafting.executor, overlap=True)
    answer = turned.submit(target)
    turned.finish()
    text = [*target.prompt, *answer.tokens]
    assert len(proposed) > (NEW_TOKENS // 6 if drafting.kind == "itself" or resting else NEW_TOKENS // 2)
    verified = answer.verified
    assert 0 < verified.rows <= len(proposed) and verified.drafted <= sum(len(guess) for _, guess in proposed)
    assert 1 + verified.rows + verified.accepted <= NEW_TOKENS
    assert sum(entries) <= PROMPT_TOKENS + NEW_TOKENS + sum(len(guess) for _, guess in proposed), (
        "the drafter must compute each entry once"
    )
    for known, guess in proposed:
        assert guess == drafting.guesses(known, len(guess)), len(known)
        assert known == text[: len(known)]
        if drafting.kind == "itself" and number == 0:
            assert guess == text[len(known) : len(known) + len(guess)], "a greedy target must accept its own draft tokens"
            assert verified.accepted == verified.drafted


@pytest.mark.parametrize("drafting", ["itself"], indirect=True)
def test_drafter_continues_after_cached_pages_and_released_memory(drafting: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached pages have the first request's draft entries. The greedy target drafts for itself, so all draft tokens are right."""
    target = next(targets(WORLD, random.Random(8), PROMPT_TOKENS, NEW_TOKENS))
    monkeypatch.setattr(DraftController, "choose", always)
    drafter = drafting.executor._steps._drafter  # type: ignore[attr-defined]
    lengths: list[int] = []
    sampled = drafter.sampled
    monkeypatch.setattr(drafter, "sampled", lambda slot, tokens: (lengths.append(len(tokens)), sampled(slot, tokens)))
    for _ in range(2):
        turned = Turned(WORLD.config(), drafting.executor, overlap=True)
        for _ in range(3):
            turned.submit(target)
            turned.finish()
            assert sum(lengths) == NEW_TOKENS and len(lengths) <= 1 + -(-(NEW_TOKENS - 1) // (WORLD.max_drafts + 1))
            lengths.clear()
        drafting.executor.apply(ReleaseMemory(kv=True, weights=True))
        assert drafter.model is None and drafter.pool is None
        drafting.executor.apply(ResumeMemory(kv=True, weights=True))
    turned = Turned(WORLD.config(), drafting.executor, overlap=False)
    answer = turned.submit(target)
    while len(answer.tokens) < NEW_TOKENS // 2:
        turned.turn()
    turned.wait()
    drafting.executor.apply(ReleaseMemory(kv=False, weights=True))  # while a request runs
    drafting.executor.apply(ResumeMemory(kv=False, weights=True))
    turned.finish()
    assert sum(lengths) == NEW_TOKENS and answer.ended


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize(("algorithm", "max_tokens"), [("draft", 20), ("eagle3", 20), ("eagle3", 8192)])
def test_drafter_stops_at_the_end_of_the_draft_context(tmp_path: Path, algorithm: str, max_tokens: int) -> None:
    """After the end of the draft context, the text continues without drafting.

    A step that is computed in pieces passes no hidden states to the drafter. States beyond the draft context are not stored.
    """
    target, draft = tmp_path / "target", tmp_path / "draft"
    TARGET.build(target)
    if algorithm == "draft":
        TinyModel("Llama", {"num_hidden_layers": 1}).build(draft)
    else:
        write_eagle3(draft, target, draft_vocab=257, prefix="model.", place="layers.0")
    file, context = draft / "config.json", PROMPT_TOKENS + NEW_TOKENS // 2
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": context}))
    plain, executor = made_of(target), made_of(target, algorithm, str(draft), max_tokens)
    drafter = executor._steps._drafter  # type: ignore[attr-defined]
    assert drafter.model.max_context == context
    asked = next(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))
    assert alone(WORLD, executor, asked).bits() == alone(World(), plain, asked).bits()
    assert not any(state.pending for state in drafter._slots.values())
    plain.close()
    executor.close()


def test_pending_states_do_not_keep_the_memory_of_the_whole_chunk(tmp_path: Path) -> None:
    """On a GPU, the drafter computes a chunk's entries before the next token is sampled. Only the last entry stays pending."""
    target, head = tmp_path / "target", tmp_path / "head"
    TARGET.build(target)
    write_eagle3(head, target, draft_vocab=257, prefix="model.", place="layers.0")
    executor = made_of(target, "eagle3", str(head))
    drafter = executor._steps._drafter  # type: ignore[attr-defined]
    drafter._slots[0] = _DrafterSlot([7] * PROMPT_TOKENS)
    with torch.inference_mode():
        drafter._table[0, :16] = torch.arange(16)
        kept = tuple(torch.zeros(PROMPT_TOKENS, 128) for _ in range(3))
        drafter.computed([Computed(0, 0, PROMPT_TOKENS, kept, from_plan=True)])
        drafter.begin()
    ((left, *_),) = drafter._slots[0].pending
    assert len(left) == 1 and left.untyped_storage().nbytes() == left.nbytes
    executor.close()


def test_loading_refuses_folders_without_a_usable_draft_model(tmp_path: Path) -> None:
    target, draft, pickled = tmp_path / "target", tmp_path / "draft", tmp_path / "pickled"
    TARGET.build(target)
    TinyModel("Llama", {"vocab_size": 100}).build(draft)
    pickled.mkdir()
    (pickled / "pytorch_model.bin").touch()
    (pickled / "config.json").write_text((draft / "config.json").read_text().replace("ForCausalLM", "ForCausalLMEagle3"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text((draft / "config.json").read_text().replace("LlamaForCausalLM", "OlmoForCausalLMEagle3"))
    messages = {
        ("draft", str(draft)): "its vocabulary has 100 tokens, fewer than the model's 257",
        ("draft", ""): "needs --speculative-draft-model-path",
        ("eagle3", str(draft)): "LlamaForCausalLM; the architecture of an EAGLE-3 head ends in Eagle3",
        ("eagle3", str(pickled)): "drafts for a model with a vocabulary of 100 tokens",
        ("eagle3", str(foreign)): "OlmoForCausalLM is not of a family that this worker has code for",
        ("mtp", ""): "no layer for multi-token prediction",
        ("mtp", str(draft)): "no layer for multi-token prediction",
        ("ngram", str(draft)): "has no effect with --speculative-algorithm ngram",
    }
    for (algorithm, path), words in messages.items():
        with pytest.raises(ValueError, match=words):
            made_of(target, algorithm, path)
    with pytest.raises(ValueError, match=r"could run code of the file.*save_file"):
        made_of(target, "draft", str(pickled))
