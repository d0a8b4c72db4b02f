"""Rules for the end of a request: reason, precedence and reported values (docs/design/scheduler.md#finish-order)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason, Submit
from rootstock_llm.services.worker.core.contracts.plan import RowFault, SamplingParams, StepResult
from rootstock_llm.services.worker.core.requests.finish import REGEX_TAIL_TOKENS, check_finished, first_stop
from rootstock_llm.services.worker.core.requests.request import make_request
from tests.core.fake_grammar import spec
from tests.core.harness import LetterDecoder
from tests.core.test_scheduler_basic import make

B = 1  # LetterDecoder reads token 1 as "b"


def ending(outputs: list[int], grammar_done: bool = False, **params: Any) -> Finish | None:
    """Returns the finish of a request whose newest output token is the last one of `outputs`; None if the request continues."""
    message = Submit(0, 0, "", np.array([5], dtype=np.int32), SamplingParams(**{"max_new_tokens": 99, **params}))
    request = make_request(message, 0, make().config, 0.0)
    request.progress.output_ids = outputs
    return check_finished(request, LetterDecoder(), grammar_done)


# The finish rules in order of precedence. Each rule ends a request with the output "cab", whose last token is B.
RULES: list[tuple[FinishReason, dict[str, Any]]] = [
    (FinishReason.LENGTH, {"max_new_tokens": 3}),
    (FinishReason.MATCHED_TOKEN, {"grammar_done": True, "min_new_tokens": 50}),
    (FinishReason.MATCHED_TOKEN, {"stop_token_ids": (B,)}),
    (FinishReason.MATCHED_STRING, {"stop": ("ab",)}),
    (FinishReason.MATCHED_REGEX, {"stop_regex": ("a.",)}),
]
NAMES = ["length", "grammar", "stop token", "stop string", "stop regex"]


class TestOrder:
    @pytest.mark.parametrize(("reason", "rule"), RULES, ids=NAMES)
    def test_each_finish_rule_ends_a_request(self, reason: FinishReason, rule: dict[str, Any]) -> None:
        found = ending([2, 0, B], **rule)
        assert found is not None and found.reason is reason

    @pytest.mark.parametrize("winner", [0, 1, 2, 3], ids=[f"{a} before {b}" for a, b in pairwise(NAMES)])
    def test_each_finish_rule_has_precedence_over_the_next_rule(self, winner: int) -> None:
        found = ending([2, 0, B], **{**RULES[winner][1], **RULES[winner + 1][1]})
        assert found is not None and found.reason is RULES[winner][0]

    def test_finish_reason_comes_from_the_first_rule_when_all_rules_apply(self) -> None:
        everything = {name: value for _, rule in RULES for name, value in rule.items()}
        found = ending([2, 0, B], **everything)
        assert found is not None and found.reason is FinishReason.LENGTH

    def test_request_continues_when_no_finish_rule_holds(self) -> None:
        assert ending([2, 0, B], stop_token_ids=(9,), stop=("zz",), stop_regex=("y+",)) is None

    def test_abort_has_precedence_over_every_finish_rule(self) -> None:
        engine = make()
        engine.submit(0, [1] * 4, max_new_tokens=1)
        engine.turn()
        engine.abort(0)
        engine.drain()
        assert engine.finishes[0].error is ErrorCode.CANCELLED and engine.finishes[0].completion_tokens == 0

    @pytest.mark.parametrize(
        ("fault", "error", "rule"),
        [
            (RowFault.NAN_LOGITS, ErrorCode.INTERNAL, {"max_new_tokens": 1}),
            (RowFault.OUT_OF_VOCAB, ErrorCode.INTERNAL, {"stop_token_ids": tuple(range(1000))}),
            (RowFault.NO_TOKEN_ALLOWED, ErrorCode.INVALID_ARGUMENT, {"stop": ("",)}),
            (RowFault.NO_TOKEN_ALLOWED, ErrorCode.INVALID_ARGUMENT, {"max_new_tokens": 1}),
        ],
    )
    def test_fault_has_precedence_over_every_finish_rule(self, rule: dict[str, Any], fault: RowFault, error: ErrorCode) -> None:
        engine = make()
        engine.executor.row_faults = {1: {0: fault}}
        engine.submit(0, [1] * 4, **{"max_new_tokens": 9, **rule})
        engine.drain()
        assert engine.finishes[0].reason is FinishReason.ABORT and engine.finishes[0].error is error
        assert engine.finishes[0].completion_tokens == 0 and 0 not in engine.outputs

    def test_token_that_the_grammar_refuses_has_precedence_over_length_and_stop_token(self) -> None:
        engine = make()
        grammar = spec(1, 1)
        engine.submit(0, [1] * 4, max_new_tokens=1, grammar=grammar)
        engine.compile()
        request = engine.core.queues.by_key[0, 0]
        refused = next(token for token in range(1000) if token not in engine.book.matcher(grammar).allowed(0))
        request.stop_token_ids = (refused,)
        plan = engine.core.plan(engine.now)
        assert plan is not None
        engine.core.commit(StepResult(plan.step_id, np.array([refused], dtype=np.int32)), engine.now)
        (output,) = engine.core.take_output()
        assert [finish.error for finish in output.finishes] == [ErrorCode.INTERNAL]


class TestTokens:
    def test_finish_reports_the_stop_token(self) -> None:
        found = ending([2, B], stop_token_ids=(7, B))
        assert found is not None and found.matched_token == B and found.matched_stop == ""

    def test_finish_reports_the_eos_token(self) -> None:
        assert ending([2, 7]) == Finish(FinishReason.MATCHED_TOKEN, matched_token=7)
        assert ending([2, 7], ignore_eos=True) is None
        assert ending([2, 7], ignore_eos=True, stop_token_ids=(7,)) == Finish(FinishReason.MATCHED_TOKEN, matched_token=7)

    @pytest.mark.parametrize(("count", "ends"), [(2, False), (3, True)])
    def test_stop_token_is_ignored_before_min_new_tokens(self, count: int, ends: bool) -> None:
        assert (ending([B] * count, stop_token_ids=(B,), min_new_tokens=3) is not None) is ends

    @pytest.mark.parametrize("num_ids", [8, 9])
    def test_stop_tokens_match_when_a_request_has_more_than_the_slot_column_holds(self, num_ids: int) -> None:
        engine = make(eos_token_ids=())
        engine.submit(0, [1] * 8, max_new_tokens=30, ignore_eos=True)
        engine.drain()
        out = engine.outputs[0]
        others = [token for token in range(1000) if token not in out[:11]][: num_ids - 1]
        engine.submit(1, [1] * 8, max_new_tokens=30, stop_token_ids=(*others, out[10]))
        engine.drain()
        assert engine.finishes[1].matched_token == out[10] and engine.outputs[1] == out[:11]

    def test_finish_reports_the_stop_token_when_the_grammar_is_complete(self) -> None:
        assert ending([2, B], True) == Finish(FinishReason.MATCHED_TOKEN, matched_token=-1)
        assert ending([2, B], True, stop_token_ids=(B,)) == Finish(FinishReason.MATCHED_TOKEN, matched_token=B)


class TestStrings:
    @pytest.mark.parametrize(
        ("text", "stops", "matched"),
        [
            ("xxaby", ("b", "ab"), "ab"),
            ("xxaby", ("ab", "aby"), "ab"),
            ("xxaby", ("aby", "ab"), "aby"),
            ("xxaby", ("q", "y"), "y"),
            ("xxaby", ("q",), None),
        ],
        ids=["earliest in the text", "first in the list", "longer and first in the list", "second in the list", "no match"],
    )
    def test_earliest_stop_string_in_the_text_matches(self, text: str, stops: tuple[str, ...], matched: str | None) -> None:
        assert first_stop(text, stops) == matched

    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_output_ends_at_the_token_that_completes_a_stop_string(self, overlap: bool) -> None:
        engine = make(overlap)
        engine.submit(0, [1] * 8, max_new_tokens=30, ignore_eos=True)
        engine.drain()
        stop = LetterDecoder().decode(engine.outputs[0][8:11])
        engine.submit(1, [1] * 8, max_new_tokens=30, ignore_eos=True, stop=("?", stop))
        engine.drain()
        assert engine.finishes[1].matched_stop == stop and engine.finishes[1].reason is FinishReason.MATCHED_STRING
        assert engine.outputs[1] == engine.outputs[0][: engine.finishes[1].completion_tokens]


class TestRegexes:
    def test_finish_reports_the_stop_pattern(self) -> None:
        assert ending([2, 0, B], stop_regex=("z", "a[bc]")) == Finish(FinishReason.MATCHED_REGEX, matched_stop="a[bc]")

    @pytest.mark.parametrize(("behind", "found"), [(REGEX_TAIL_TOKENS - 1, True), (REGEX_TAIL_TOKENS, False)])
    def test_stop_pattern_is_searched_in_the_last_256_tokens(self, behind: int, found: bool) -> None:
        assert REGEX_TAIL_TOKENS == 256
        assert (ending([25] + [0] * behind, max_new_tokens=999, stop_regex=("z",)) is not None) is found

    def test_stop_pattern_ends_a_request(self) -> None:
        engine = make()
        engine.submit(0, [1] * 8, max_new_tokens=90, ignore_eos=True, stop_regex=("[a-e][f-m]",))
        engine.drain()
        assert engine.finishes[0].reason is FinishReason.MATCHED_REGEX
        engine.check_answer(0)


class TestLength:
    @pytest.mark.parametrize(("max_new", "overlap"), [(1, True), (1, False), (2, True), (30, False)])
    def test_request_ends_after_max_new_tokens(self, max_new: int, overlap: bool) -> None:
        engine = make(overlap)
        engine.submit(0, [1] * 8, max_new_tokens=max_new, ignore_eos=True)
        engine.drain()
        finish: Finish = engine.finishes[0]
        assert (finish.reason, finish.completion_tokens, len(engine.outputs[0])) == (FinishReason.LENGTH, max_new, max_new)

    @pytest.mark.parametrize(("length", "max_new", "fits"), [(100, 28, True), (100, 29, False), (127, 1, True), (128, 1, False)])
    def test_request_is_refused_when_longer_than_the_context(self, length: int, max_new: int, fits: bool) -> None:
        engine = make()
        engine.submit(0, [1] * length, max_new_tokens=max_new, ignore_eos=True)
        engine.drain()
        finish = engine.finishes[0]
        assert finish.reason is FinishReason.LENGTH if fits else finish.error is ErrorCode.INVALID_ARGUMENT

    def test_request_ends_after_max_new_tokens_when_the_grammar_is_incomplete(self) -> None:
        engine = make()
        engine.submit(0, [1] * 8, max_new_tokens=6, grammar=spec(0, 20))
        engine.drain()
        assert engine.finishes[0].reason is FinishReason.LENGTH and len(engine.outputs[0]) == 6
