"""Tests the end, the masks and the limits of a matcher, and the buffers and the budget of the mask filler."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xgrammar

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import PauseMode, Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.grammar.compile.byte_cursor import ByteCursor
from rootstock_llm.services.worker.grammar.compile.forking_compiler import prepare
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled, GrammarCompiler
from rootstock_llm.services.worker.grammar.compile.grammar_limits import GrammarLimits
from rootstock_llm.services.worker.grammar.compile.trial import allowed_ids, run_trial
from rootstock_llm.services.worker.grammar.compile.vocabulary import Vocabulary, vocabulary_of
from rootstock_llm.services.worker.grammar.match.mask_filler import MaskFiller
from rootstock_llm.services.worker.grammar.match.matcher import (
    BROKEN,
    MAX_BACKLOG,
    TOO_SLOW,
    ForcedText,
    MatcherSetup,
    XgrammarMatcher,
)
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from rootstock_llm.services.worker.loop.text_rules import ModelText
from rootstock_llm.services.worker.text.step_meter import StepMeter
from tests.core.deployed_config import deployed_config
from tests.grammar import model


def regex(pattern: str) -> Compiled:
    return model.compiled(GrammarSpec(GrammarKind.REGEX, pattern))


def schema(value: Any) -> Compiled:
    return model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value)))


def feed(matcher: XgrammarMatcher, text: str) -> None:
    (ids,) = model.tokenizer().encode_batch([text], False)
    assert all(matcher.accept(token) for token in ids), text


def over(vocabulary: Vocabulary, pattern: str) -> XgrammarMatcher:
    """Returns a matcher of a regular expression for the given vocabulary."""
    grammar = GrammarCompiler(vocabulary.info(), jumps=False).compile(prepare(GrammarSpec(GrammarKind.REGEX, pattern)))
    return XgrammarMatcher(grammar, MatcherSetup.of(vocabulary, None), StepMeter(1e6, 1e6), model.does_not_tolerate_overrun)


def test_stop_token_ends_complete_output() -> None:
    matcher = model.matcher(regex("[0-9]+"))
    assert not matcher.accept(model.EOS[1])
    feed(matcher, "12")
    assert not matcher.terminated
    assert set(model.EOS) <= set(allowed_ids(matcher.mask(), 1280))
    assert matcher.accept(model.EOS[1])
    assert matcher.terminated
    assert allowed_ids(matcher.mask(), 1280) == sorted(model.EOS)


def test_output_ends_when_no_token_can_follow() -> None:
    matcher = model.matcher(regex("[0-9]{2}"))
    feed(matcher, "1")
    assert not matcher.terminated
    feed(matcher, "2")
    assert matcher.terminated


def test_output_ends_with_the_grammar_when_the_model_has_no_eos_token() -> None:
    matcher = over(model.vocabulary(stop_ids=()), "ab?")
    feed(matcher, "a")
    assert not matcher.terminated
    feed(matcher, "b")
    assert matcher.terminated


def test_refused_token_leaves_mask_unchanged() -> None:
    matcher = model.matcher(regex("[0-9]{2}"))
    before = matcher.mask().copy()
    im_start = 1
    for token in (im_start, -1, 1280, 5_000_000, *model.EOS, *model.tokenizer().encode_batch(["a"], False)[0]):
        assert not matcher.accept(token)
    np.testing.assert_array_equal(matcher.mask(), before)


def test_mask_excludes_ids_beyond_tokenizer() -> None:
    vocabulary = model.vocabulary(1301)
    matcher = over(vocabulary, r"[\s\S]*")
    allowed = allowed_ids(matcher.mask(), 41 * 32)
    assert max(allowed) < 1280
    assert 1 not in allowed, "a grammar does not allow special tokens as text"
    assert {token for token in range(3, 1280) if model.vocabulary().tokens[token].isascii()} <= set(allowed)
    assert not matcher.accept(1300)


def test_mask_is_cut_when_vocabulary_is_smaller_than_tokenizer() -> None:
    matcher = over(model.vocabulary(700), r"[\s\S]*")
    assert matcher.mask().shape == (22,)
    assert max(allowed_ids(matcher.mask(), 704)) < 700


def test_matcher_fails_when_the_cpu_time_exceeds_the_limit() -> None:
    setup = MatcherSetup.of(model.vocabulary(), None)
    reported: list[bool] = []

    def report_overrun() -> bool:
        reported.append(True)
        return False

    matcher = XgrammarMatcher(regex("[0-9]+"), setup, StepMeter(step_ms=0, burst_ms=0), report_overrun)
    assert not matcher.fault
    matcher.mask()
    assert matcher.fault == TOO_SLOW
    assert not matcher.accept(model.tokenizer().encode_batch(["1"], False)[0][0])
    matcher.charge(1.0)
    assert reported == [True], "the overrun is reported once"


def test_cpu_time_meter_is_reset_when_an_overrun_is_tolerated() -> None:
    tolerated = [True, False]
    setup = MatcherSetup.of(model.vocabulary(), None)
    matcher = XgrammarMatcher(regex("[0-9]+"), setup, StepMeter(step_ms=0, burst_ms=50), lambda: tolerated.pop(0))
    matcher.charge(1.0)
    assert tolerated == [False] and not matcher.fault
    matcher.charge(0.03)
    assert tolerated == [False] and not matcher.fault
    matcher.charge(0.03)
    assert tolerated == [] and matcher.fault == TOO_SLOW


@pytest.mark.parametrize(
    "seconds, tokens_between, overrun",
    [([0.004] * 100, 1, False), ([0.02], 0, False), ([0.06], 0, True), ([0.01] * 8, 1, False), ([0.01] * 20, 1, True)],
)
def test_cpu_time_meter_overruns_after_lasting_slowness_but_not_after_a_burst(
    seconds: list[float], tokens_between: int, overrun: bool
) -> None:
    meter = StepMeter(step_ms=5, burst_ms=50)
    for second in seconds:
        meter.spend(second)
        for _ in range(tokens_between):
            meter.step()
    assert meter.overrun is overrun


@pytest.mark.parametrize("method", ["is_terminated", "is_completed", "accept_token", "fill_next_token_bitmask"])
def test_library_error_ends_only_one_request(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matcher, other = model.matcher(regex("[0-9]+"), jump=True), model.matcher(regex("[0-9]+"), jump=True)
    (digit,) = model.tokenizer().encode_batch(["1"], False)[0]
    with monkeypatch.context() as broken:
        broken.setattr(xgrammar.GrammarMatcher, method, raises)
        matcher.mask()
        assert not matcher.terminated
        matcher.accept(digit)
        matcher.forced()
        assert not matcher.terminated
    assert matcher.fault == BROKEN
    assert "out of the library" in caplog.text
    assert digit in allowed_ids(matcher.mask(), 1280), (
        "the mask still allows a token, because the worker reads the fault when it accepts one"
    )
    assert not matcher.accept(digit)
    assert other.accept(digit)


def raises(*_: object) -> None:
    raise RuntimeError("out of the library")


def test_trial_run_refuses_a_grammar_with_an_expensive_jump_search() -> None:
    limits = GrammarLimits(step_ms=0.1, burst_ms=5)
    cheap = regex("a*")
    endless = model.compiled(GrammarSpec(GrammarKind.EBNF, 'root ::= "a" root'))  # the search reads 256 bytes after each token
    run_trial(cheap, model.vocabulary().tokens, limits)
    with pytest.raises(GrammarRefused, match="too expensive"):
        run_trial(Compiled(cheap.grammar, endless.by_bytes), model.vocabulary().tokens, limits)


def test_trial_run_refuses_expensive_grammars_and_grammars_with_a_dead_end() -> None:
    ambiguous = model.compiled(GrammarSpec(GrammarKind.EBNF, "root ::= s\ns ::= s s s | s s | [a-z]"))
    nowhere = model.compiled(GrammarSpec(GrammarKind.EBNF, 'root ::= "ab" x\nx ::= x'))
    with pytest.raises(GrammarRefused, match="too expensive"):
        run_trial(ambiguous, model.vocabulary().tokens, GrammarLimits())
    with pytest.raises(GrammarRefused, match="dead end"):
        run_trial(nowhere, model.vocabulary().tokens, GrammarLimits())
    run_trial(regex("[0-9]+"), model.vocabulary().tokens, GrammarLimits())


def test_masks_of_a_step_stay_valid_when_the_next_masks_are_filled() -> None:
    filler = MaskFiller(1280, max_rows=3)
    first, second = model.matcher(regex("[0-9]+")), model.matcher(regex("[a-z]+"))
    masks = filler.fill([(4, first), (9, second)])
    copies = {row: mask.copy() for row, mask in masks.items()}
    feed(first, "1")
    filler.fill([(0, first)])
    assert masks.keys() == {4, 9}
    for row, mask in masks.items():
        assert mask.dtype == np.uint32 and mask.shape == (40,)
        np.testing.assert_array_equal(mask, copies[row])
    assert allowed_ids(masks[4], 1280) == [t for t in range(1280) if model.vocabulary().tokens[t].isdigit()]


def test_masks_for_draft_tokens_equal_the_masks_after_acceptance() -> None:
    """Each draft token of a row gives a mask for the token after it. The matchers do not advance.

    The masks of a row end before a draft token that the grammar refuses or that ends the output.
    """
    filler = MaskFiller(1280, max_rows=4, max_drafts=12)
    names = {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}
    (drafts,) = model.tokenizer().encode_batch(['["red", "green"]'], False)
    refused = [*drafts[:2], model.tokenizer().encode_batch(["7"], False)[0][0], *drafts[2:]]
    matchers = {row: model.matcher(schema(names)) for row in (2, 5, 6)}
    before = {row: mask.copy() for row, mask in filler.fill(matchers.items()).items()}
    masks = filler.fill_after_drafts(matchers.items(), {2: [*drafts, model.EOS[0], 5], 5: refused, 6: drafts})
    assert {row: len(mask) for row, mask in masks.items()} == {2: len(drafts), 5: 2, 6: 12 - len(drafts) - 2}
    for row, matcher in matchers.items():
        np.testing.assert_array_equal(matcher.mask(), before[row])
        assert not matcher.terminated and not matcher.fault
    for index, token in enumerate(drafts):
        for row in matchers:
            if index < len(masks[row]):
                assert matchers[row].accept(token)
                np.testing.assert_array_equal(masks[row][index], matchers[row].mask())


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_filled_as_a_batch_equal_masks_filled_one_by_one(threads: int) -> None:
    patterns = ["[0-9]+", "[a-z]+", "yes|no", "x", "(a|b)*", r"[\s\S]*"]
    matchers = [model.matcher(regex(pattern)) for pattern in patterns]
    assert matchers[3].accept(model.tokenizer().encode_batch(["x"], False)[0][0])  # this matcher has ended
    filler = MaskFiller(1280, max_rows=8, threads=threads)
    for _ in range(3):
        masks = filler.fill(list(enumerate(matchers)))
        for row, pattern in enumerate(patterns):
            alone = model.matcher(regex(pattern))
            if row == 3:
                assert allowed_ids(masks[row], 1280) == sorted(model.EOS)
            else:
                np.testing.assert_array_equal(masks[row], alone.mask())


def test_masks_are_filled_one_by_one_when_the_batch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar.BatchGrammarMatcher, "batch_fill_next_token_bitmask", raises)
    matchers = [model.matcher(regex(pattern)) for pattern in ("[0-9]+", "[a-z]+", "yes|no", "x", "y")]
    masks = MaskFiller(1280, max_rows=8, threads=2).fill(list(enumerate(matchers)))
    for row, matcher in enumerate(matchers):
        np.testing.assert_array_equal(masks[row], matcher.mask())
        assert not matcher.fault


class Ticks:
    """A clock of CPU time that advances by 1 ms with every second call."""

    def __init__(self) -> None:
        self._looked = 0

    def thread_time(self) -> float:
        self._looked += 1
        return self._looked // 2 * 1e-3


@pytest.mark.parametrize("budget_ms, ended", [(100.0, []), (20.0, [0])])
def test_grammars_of_a_step_share_one_time_budget(budget_ms: float, ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock_llm.services.worker.grammar.match.matcher.time", Ticks())
    setup = MatcherSetup.of(model.vocabulary(), None)
    matchers = [XgrammarMatcher(regex("[0-9]+"), setup, StepMeter(5, 50), model.does_not_tolerate_overrun) for _ in range(20)]
    filler = MaskFiller(1280, max_rows=20, fill_ms=budget_ms)
    (digit,) = model.tokenizer().encode_batch(["1"], False)[0]
    steps = 0
    # A step takes 3 ms of CPU time for the first matcher, and 2 ms for each other matcher.
    while steps < 10 and not any(matcher.fault for matcher in matchers):
        for matcher in [matchers[0], *matchers]:
            matcher.accept(digit)
        filler.fill(list(enumerate(matchers)))
        steps += 1
    assert [index for index, matcher in enumerate(matchers) if matcher.fault] == ended


def test_byte_cursor_reads_accepted_tokens_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU time of reading a resumed output counts in the steps of its tokens, and not in the single step after them."""
    lengths: list[int] = []

    def advance(cursor: ByteCursor, data: bytes) -> None:
        lengths.append(len(data))
        plain(cursor, data)

    plain = ByteCursor.advance
    monkeypatch.setattr(ByteCursor, "advance", advance)
    matcher = model.matcher(regex("a{1000}the end of it"), jump=True)
    (token,) = model.tokenizer().encode_batch(["a"], False)[0]
    assert all(matcher.accept(token) for _ in range(1000))
    text = b"".join(model.vocabulary().tokens[found] for found in matcher.forced())
    assert len(text) > 5 and b"the end of it".startswith(text)
    assert sum(lengths) == 1000 and max(lengths) <= MAX_BACKLOG


def test_resumed_outputs_do_not_count_as_a_slow_step() -> None:
    """Each matcher has accepted a long output before its first mask. The budget of the mask's step does not include this time."""
    grammar = GrammarSpec(GrammarKind.JSON_OBJECT, "")
    text = '{"a": [' + ", ".join('{"k": "hello", "z": [1, 2]}' for _ in range(90)) + "]}"
    (ids,) = model.tokenizer().encode_batch([text], False)
    ids = [token for token in ids if token not in model.EOS]
    compiled, setup = model.compiled(grammar), MatcherSetup.of(model.vocabulary(), ForcedText(model.tokenizer()))
    overruns: list[str] = []

    class Book:
        def open(self, spec: GrammarSpec, tenant: bytes = b"") -> XgrammarMatcher:
            return XgrammarMatcher(compiled, setup, StepMeter(10.0, 100.0), lambda: bool(overruns.append(spec.kind)))

    config = deployed_config(num_pages=4096, page_size=16, context_len=4096, vocab_size=1280, max_running_requests=32)
    core = Scheduler(config, ModelText(model.tokenizer()), Book())
    SchedulerControl(core).pause(PauseMode.IN_PLACE, 0.0)
    params, prompt = SamplingParams(max_new_tokens=4000, grammar=grammar), np.array([5], dtype=np.int32)
    for handle in range(24):
        core.submit(Submit(0, handle, f"r{handle}", prompt, params, output_ids=tuple(ids[:-2])), 0.0)
    while core.stats().num_gated:
        core.plan(0.0)
    matchers = [request.matcher for request in core.queues.by_key.values() if isinstance(request.matcher, XgrammarMatcher)]
    assert len(matchers) == 24 and len(ids) > 1000
    MaskFiller(1280, 32).fill(enumerate(matchers))
    assert not overruns


@pytest.mark.parametrize("markers", [(), ("<|im_start|>", "<|im_end|>", "[not of this model]")], ids=["no markers", "markers"])
def test_special_token_is_allowed_in_the_output_only_as_a_marker(markers: tuple[str, ...]) -> None:
    """A special token that ends the output is never allowed as a marker."""
    start, end = model.tokenizer().token_id("<|im_start|>"), model.tokenizer().token_id("<|im_end|>")
    assert start is not None and end is not None
    vocabulary = vocabulary_of(model.tokenizer(), 1280, (0, end), markers)
    layout = {"type": "tag", "begin": "<|im_start|>", "content": {"type": "const_string", "value": "<|im_end|>"}, "end": "!"}
    spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": layout}))
    grammar = GrammarCompiler(vocabulary.info(), jumps=False).compile(prepare(spec))
    matcher = XgrammarMatcher(grammar, MatcherSetup.of(vocabulary, None), StepMeter(1e6, 1e6), lambda: False)
    assert (start in allowed_ids(matcher.mask(), 1280)) is bool(markers)
    if markers:
        assert matcher.accept(start) and end not in allowed_ids(matcher.mask(), 1280)
