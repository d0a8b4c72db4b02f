"""A matcher's ends, masks, jumps and guard; the filler's two buffers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xgrammar

from services.worker.core.sampling import GrammarKind, GrammarSpec
from services.worker.grammar.grammar_limits import GrammarLimits, StepMeter
from services.worker.grammar.mask_filler import MaskFiller
from services.worker.grammar.matcher import TOO_SLOW, MatcherSetup, XgrammarMatcher
from services.worker.grammar.refusal import GrammarRefused
from services.worker.grammar.trial import allowed_ids, try_out
from services.worker.grammar.vocabulary import Vocabulary
from tests.grammar import model


def regex(pattern: str) -> xgrammar.CompiledGrammar:
    return model.compiled(GrammarSpec(GrammarKind.REGEX, pattern))


def schema(value: Any) -> xgrammar.CompiledGrammar:
    return model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value)))


def feed(matcher: XgrammarMatcher, text: str) -> None:
    (ids,) = model.tokenizer().encode_batch([text], False)
    assert all(matcher.accept(token) for token in ids), text


def over(vocabulary: Vocabulary, pattern: str) -> XgrammarMatcher:
    """A matcher for a vocabulary of its own."""
    compiler = xgrammar.GrammarCompiler(vocabulary.info(), max_threads=1)
    return XgrammarMatcher(compiler.compile_regex(pattern), MatcherSetup.of(vocabulary, None), StepMeter(1e6, 1e6))


def test_a_stop_token_ends_an_output_that_is_complete() -> None:
    matcher = model.matcher(regex("[0-9]+"))
    assert not matcher.accept(model.EOS[1])
    feed(matcher, "12")
    assert not matcher.terminated
    assert set(model.EOS) <= set(allowed_ids(matcher.mask(), 1280))
    assert matcher.accept(model.EOS[1])
    assert matcher.terminated
    assert allowed_ids(matcher.mask(), 1280) == sorted(model.EOS)


def test_an_output_that_nothing_can_follow_is_at_its_end() -> None:
    matcher = model.matcher(regex("[0-9]{2}"))
    feed(matcher, "1")
    assert not matcher.terminated
    feed(matcher, "2")
    assert matcher.terminated


def test_a_model_without_eos_ends_where_nothing_can_follow() -> None:
    matcher = over(model.vocabulary(stop_ids=()), "ab?")
    feed(matcher, "a")
    assert not matcher.terminated
    feed(matcher, "b")
    assert matcher.terminated


def test_a_refused_token_leaves_the_state_as_it_was() -> None:
    matcher = model.matcher(regex("[0-9]{2}"))
    before = matcher.mask().copy()
    im_start = 1
    for token in (im_start, -1, 1280, 5_000_000, *model.EOS, *model.tokenizer().encode_batch(["a"], False)[0]):
        assert not matcher.accept(token)
    np.testing.assert_array_equal(matcher.mask(), before)


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    vocabulary = model.vocabulary(1301)
    matcher = over(vocabulary, r"[\s\S]*")
    allowed = allowed_ids(matcher.mask(), 41 * 32)
    assert max(allowed) < 1280
    assert 1 not in allowed, "special tokens are no text"
    assert {token for token in range(3, 1280) if model.vocabulary().tokens[token].isascii()} <= set(allowed)
    assert not matcher.accept(1300)


def test_a_vocabulary_smaller_than_the_tokenizers_is_cut() -> None:
    matcher = over(model.vocabulary(700), r"[\s\S]*")
    assert matcher.mask().shape == (22,)
    assert max(allowed_ids(matcher.mask(), 704)) < 700


PERSON = {
    "type": "object",
    "properties": {"first_name": {"const": "naïve 世界"}, "age": {"type": "integer"}},
    "required": ["first_name", "age"],
}


def written(tokens: tuple[int, ...]) -> bytes:
    return b"".join(model.vocabulary().tokens[token] for token in tokens)


def test_what_the_grammar_forces_is_accepted_but_for_its_last_token() -> None:
    matcher = model.matcher(regex("(yes|no) and so it shall be, 世界(!|[.])"), jump=True)
    assert matcher.forced() == ()
    feed(matcher, "y")
    tokens = tuple(matcher.forced())
    assert len(tokens) >= 2
    assert "es and so it shall be, 世界".encode().startswith(written(tokens))
    assert len(written(tokens)) < len("es and so it shall be, 世界".encode())
    while not matcher.terminated:
        assert matcher.accept(next(token for token in allowed_ids(matcher.mask(), 1280) if token not in model.EOS))


def test_a_jump_to_the_grammars_end_takes_all() -> None:
    matcher = model.matcher(regex("(yes|no) and so it shall be"), jump=True)
    feed(matcher, "n")
    assert written(tuple(matcher.forced())) == b"o and so it shall be"
    assert matcher.terminated
    assert matcher.forced() == ()


def test_a_jump_ends_before_a_character_that_is_forced_in_part() -> None:
    matcher = model.matcher(regex("abc def ghi (世|丗)c"), jump=True)  # of three bytes, two agree
    tokens = tuple(matcher.forced())
    assert tokens
    assert b"abc def ghi ".startswith(written(tokens))
    feed(matcher, "abc def ghi 世c"[len(written(tokens)) :])
    assert matcher.terminated


def test_a_single_forced_token_is_left_to_the_model() -> None:
    matcher = model.matcher(regex("(x|y)z(a|b)"), jump=True)
    feed(matcher, "x")
    before = allowed_ids(matcher.mask(), 1280)
    assert matcher.forced() == ()
    assert allowed_ids(matcher.mask(), 1280) == before


def test_text_with_jumps_is_what_the_schema_says() -> None:
    matcher = model.matcher(schema(PERSON), jump=True)
    tokens: list[int] = []
    while not matcher.terminated:
        tokens += matcher.forced()
        if matcher.terminated:
            break
        allowed = [token for token in allowed_ids(matcher.mask(), 1280) if token not in model.EOS]
        token = max(allowed, key=lambda found: (model.vocabulary().tokens[found] in (b"}", b"}\n"), found))
        assert matcher.accept(token)
        tokens.append(token)
    assert json.loads(written(tuple(tokens)))["first_name"] == "naïve 世界"


def test_jumps_can_be_switched_off() -> None:
    assert model.matcher(regex("abcdefgh ijkl"), jump=False).forced() == ()


def test_a_matcher_that_costs_too_much_ends_its_request() -> None:
    setup = MatcherSetup.of(model.vocabulary(), None)
    matcher = XgrammarMatcher(regex("[0-9]+"), setup, StepMeter(step_ms=0, burst_ms=0))
    assert not matcher.fault
    matcher.mask()
    assert matcher.fault == TOO_SLOW
    assert not matcher.accept(model.tokenizer().encode_batch(["1"], False)[0][0])


@pytest.mark.parametrize(
    "seconds, tokens_between, overrun",
    [([0.004] * 100, 1, False), ([0.02], 0, False), ([0.06], 0, True), ([0.01] * 8, 1, False), ([0.01] * 20, 1, True)],
)
def test_the_meter_bears_bursts_and_no_lasting_slowness(seconds: list[float], tokens_between: int, overrun: bool) -> None:
    meter = StepMeter(step_ms=5, burst_ms=50)
    for second in seconds:
        meter.spend(second)
        for _ in range(tokens_between):
            meter.token()
    assert meter.overrun is overrun


def test_the_trial_refuses_what_is_too_expensive_and_what_leads_nowhere() -> None:
    ambiguous = model.compiled(GrammarSpec(GrammarKind.EBNF, "root ::= s\ns ::= s s s | s s | [a-z]"))
    nowhere = model.compiled(GrammarSpec(GrammarKind.EBNF, 'root ::= "ab" x\nx ::= x'))
    with pytest.raises(GrammarRefused, match="too expensive"):
        try_out(ambiguous, 40, 1280, GrammarLimits())
    with pytest.raises(GrammarRefused, match="allows nothing"):
        try_out(nowhere, 40, 1280, GrammarLimits())
    try_out(regex("[0-9]+"), 40, 1280, GrammarLimits())


def test_a_steps_masks_outlive_the_filling_of_the_next() -> None:
    filler = MaskFiller(1280, max_rows=3)
    first, second = model.matcher(regex("[0-9]+")), model.matcher(regex("[a-z]+"))
    masks = filler.fill([(4, first), (9, second)])
    kept = {row: mask.copy() for row, mask in masks.items()}
    feed(first, "1")
    filler.fill([(0, first)])
    assert masks.keys() == {4, 9}
    for row, mask in masks.items():
        assert mask.dtype == np.uint32 and mask.shape == (40,)
        np.testing.assert_array_equal(mask, kept[row])
    assert allowed_ids(masks[4], 1280) == [t for t in range(1280) if model.vocabulary().tokens[t].isdigit()]


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_of_many_rows_are_those_of_each_alone(threads: int) -> None:
    patterns = ["[0-9]+", "[a-z]+", "yes|no", "x", "(a|b)*", r"[\s\S]*"]
    matchers = [model.matcher(regex(pattern)) for pattern in patterns]
    assert matchers[3].accept(model.tokenizer().encode_batch(["x"], False)[0][0])  # one is at its end
    filler = MaskFiller(1280, max_rows=8, threads=threads)
    for _ in range(3):
        masks = filler.fill(list(enumerate(matchers)))
        for row, pattern in enumerate(patterns):
            alone = model.matcher(regex(pattern))
            if row == 3:
                assert allowed_ids(masks[row], 1280) == sorted(model.EOS)
            else:
                np.testing.assert_array_equal(masks[row], alone.mask())
