"""Rules for requests with output from another worker, which continue like retracted requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason, SessionTurn, Submit, TraceKind
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, SamplingParams
from tests.all_pairs import each_value
from tests.core.fake_grammar import PositionMatcher, spec
from tests.core.harness import Engine, LetterDecoder
from tests.core.test_scheduler_basic import finish_of, make

PROMPT = [5, 6, 7, 8, 9, 10]
INVALID = (FinishReason.ABORT, ErrorCode.INVALID_ARGUMENT)


def undisturbed(**params: Any) -> tuple[list[int], Finish]:
    engine = make()
    engine.submit(0, PROMPT, **params)
    engine.drain()
    return engine.outputs[0], engine.finishes[0]


def resumed(output: list[int], overlap: bool = True, **params: Any) -> Engine:
    engine = make(overlap)
    engine.submit(0, PROMPT, output=output, **params)
    engine.drain()
    return engine


def end_of(finish: Finish) -> tuple[object, ...]:
    return (
        finish.reason,
        finish.matched_stop,
        finish.matched_token,
        finish.error,
        finish.prompt_tokens,
        finish.completion_tokens,
    )


def letters(tokens: list[int]) -> str:
    return LetterDecoder().decode(tokens)


WHOLE = undisturbed(max_new_tokens=24, ignore_eos=True)[0]
WISHES: dict[str, dict[str, Any]] = {
    "length": {},
    "stop token": {"stop_token_ids": (WHOLE[15],)},
    "stop string": {"stop": (letters(WHOLE)[13:17],)},
    "stop pattern": {"stop_regex": (letters(WHOLE)[12:15] + "+",)},
    "min new tokens": {"stop_token_ids": (WHOLE[3], WHOLE[18]), "min_new_tokens": 10},
    "grammar": {"grammar": spec(1, 17)},
    "grammar without jumps": {"grammar": spec(1, 17), "top_logprobs": 0},
    "logprobs": {"top_logprobs": 1},
    "prompt logprobs": {"top_logprobs": 1, "prompt_logprobs_from": 0},
    "intervals": {"stream_interval": 5},
}


class TestResumedOutput:
    @pytest.mark.by_day(one_in=3, seed=10)
    @pytest.mark.by_day(one_in=1, wish="prompt logprobs")
    @each_value(wish=list(WISHES), overlap=[True, False])
    def test_resumed_output_equals_the_uninterrupted_output(self, wish: str, overlap: bool) -> None:
        params = {"max_new_tokens": 24, "ignore_eos": True, **WISHES[wish]}
        whole, finish = undisturbed(**params)
        for cut in range(1, len(whole) + 1):
            engine = resumed(whole[:cut], overlap, **params)
            assert engine.outputs.get(0, []) == whole[cut:], cut
            assert end_of(engine.finishes[0]) == end_of(finish), cut
            assert engine.finishes[0].cached_tokens <= len(PROMPT)
            engine.check_answer(0)

    def test_resumed_output_is_sent_at_the_end_when_the_request_does_not_stream(self) -> None:
        engine = make()
        engine.submit(0, PROMPT, output=WHOLE[:9], stream=False, max_new_tokens=24, ignore_eos=True)
        for _ in range(12):
            engine.turn()
        assert not engine.outputs
        engine.drain()
        assert engine.outputs[0] == WHOLE[9:]

    def test_resumed_request_is_correct_under_retraction(self) -> None:
        engine = make(retract_interval=3)
        engine.submit(0, PROMPT, output=WHOLE[:9], max_new_tokens=24, ignore_eos=True, top_logprobs=0)
        engine.drain()
        assert engine.outputs[0] == WHOLE[9:] and engine.finishes[0].retractions > 2
        engine.check_answer(0)


class TestCompleteOutput:
    @pytest.mark.parametrize(
        ("params", "reason"),
        [
            ({"max_new_tokens": 8}, FinishReason.LENGTH),
            ({"max_new_tokens": 5}, FinishReason.LENGTH),
            ({"max_new_tokens": 9, "stop_token_ids": (WHOLE[7],)}, FinishReason.MATCHED_TOKEN),
            ({"max_new_tokens": 9, "stop": (letters(WHOLE)[5:8],)}, FinishReason.MATCHED_STRING),
            ({"max_new_tokens": 9, "stop_regex": (letters(WHOLE)[6:8],)}, FinishReason.MATCHED_REGEX),
        ],
        ids=["at the limit", "beyond the limit", "stop token", "stop string", "stop pattern"],
    )
    def test_resumed_request_ends_immediately_when_the_earlier_output_is_complete(
        self, params: dict[str, Any], reason: FinishReason
    ) -> None:
        engine = make()
        engine.submit(0, PROMPT, output=WHOLE[:8], ignore_eos=True, **params)
        engine.turn()
        finish = engine.finishes[0]
        assert (finish.reason, finish.completion_tokens, finish.prompt_tokens) == (reason, 8, 6)
        assert not engine.outputs and not engine.plans

    def test_resumed_request_ends_at_eos_unless_eos_is_ignored(self) -> None:
        stopped, ignored = resumed([20, 7], max_new_tokens=9), resumed([20, 7], max_new_tokens=9, ignore_eos=True)
        assert (stopped.finishes[0].reason, stopped.finishes[0].matched_token) == (FinishReason.MATCHED_TOKEN, 7)
        assert len(ignored.outputs[0]) == 7

    def test_resumed_request_ends_when_the_earlier_output_completes_the_grammar(self) -> None:
        whole, finish = undisturbed(max_new_tokens=24, grammar=spec(1, 17))
        engine = resumed(whole, max_new_tokens=24, grammar=spec(1, 17))
        assert end_of(engine.finishes[0]) == end_of(finish) and finish.completion_tokens == 17
        assert not engine.plans


class TestGrammars:
    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("late", [True, False])
    def test_resumed_request_ends_when_the_grammar_refuses_the_output(self, late: bool) -> None:
        engine = make()
        if not late:
            engine.book.ready.add(spec(1, 17))
        engine.submit(0, PROMPT, output=[1, 2, 3], max_new_tokens=24, grammar=spec(1, 17))
        engine.submit(1, PROMPT, max_new_tokens=4)
        engine.drain()
        assert finish_of(engine, 0) == INVALID and engine.finishes[0].field == "output_ids"
        assert engine.finishes[0].completion_tokens == 3
        engine.check_answer(1)

    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("late", [True, False])
    def test_matcher_replays_a_long_earlier_output_over_several_loop_iterations(self, late: bool) -> None:
        grammar = spec(1, 40)
        whole, _ = undisturbed(max_new_tokens=50, grammar=grammar, ignore_eos=True)
        engine = make()
        engine.core.queues.gate._replay_tokens = 4
        if not late:
            engine.book.ready.add(grammar)
        engine.submit(9, [4] * 5, max_new_tokens=60, ignore_eos=True)
        for handle in range(3):
            engine.submit(handle, PROMPT, output=whole[: 20 + handle], max_new_tokens=50, grammar=grammar, ignore_eos=True)
        engine.compile()
        for _ in range(5):
            engine.turn()
        assert engine.core.stats().num_gated == 2 and len(engine.outputs[9]) >= 4
        engine.abort(1)
        engine.drain()
        for handle in (0, 2, 9):
            engine.check_answer(handle)
        assert engine.outputs[0] == whole[20:] and engine.outputs[2] == whole[22:]
        assert finish_of(engine, 1) == (FinishReason.ABORT, ErrorCode.CANCELLED)

    def test_matcher_replays_the_earlier_output_in_small_parts_when_tokens_are_expensive(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def accept(matcher: PositionMatcher, token: int) -> bool:
            matcher.cost_s += 0.001
            return plain(matcher, token)

        plain = PositionMatcher.accept
        grammar = spec(1, 120)
        whole, _ = undisturbed(max_new_tokens=110, grammar=grammar, ignore_eos=True)
        monkeypatch.setattr(PositionMatcher, "accept", accept)
        engine = make()
        engine.book.ready.add(grammar)
        for handle in range(2):
            engine.submit(handle, PROMPT, output=whole[:100], max_new_tokens=110, grammar=grammar, ignore_eos=True)
        gated = []
        while (count := engine.core.stats().num_gated) or not gated:
            gated.append(count)
            engine.turn()
        assert gated == [2, 2, 2, 2, 1, 1, 1], "a scheduler iteration replays 32 tokens in all, and each request has 99"
        costs = [request.matcher.take_cost() for request in engine.core.queues.by_key.values() if request.matcher]
        assert len(costs) == 2 and max(costs) < 0.02
        engine.drain()
        assert engine.outputs == {0: whole[100:], 1: whole[100:]}

    def test_forced_tokens_after_the_earlier_output_of_a_resumed_request_are_sent(self) -> None:
        grammar = spec(0, 24)
        whole, _ = undisturbed(max_new_tokens=24, grammar=grammar)
        engine = resumed(whole[:1], max_new_tokens=24, grammar=grammar)
        assert engine.outputs[0] == whole[1:]
        assert engine.plans[0].num_tokens[0] > len(PROMPT) + 1, (
            "forced tokens after the earlier output are part of the first extend"
        )


class TestQueue:
    def test_resumed_request_runs_before_new_requests(self) -> None:
        engine = make(max_running_requests=1)
        for handle in range(3):
            engine.submit(handle, [handle] * 8, max_new_tokens=3)
        engine.submit(3, PROMPT, output=WHOLE[:4], max_new_tokens=8)
        engine.turn()
        assert engine.core.stats().num_waiting == 3 and engine.core.stats().num_retracted == 0, (
            "a resumed request is waiting and does not count as retracted"
        )
        engine.drain()
        assert list(engine.finishes) == [3, 0, 1, 2]

    def test_full_queue_accepts_a_resumed_request(self) -> None:
        engine = make(max_queued_requests=1)
        engine.submit(0, PROMPT, max_new_tokens=3)
        engine.submit(1, PROMPT, output=WHOLE[:4], max_new_tokens=8, ignore_eos=True)
        engine.submit(2, PROMPT, max_new_tokens=3)
        engine.drain()
        assert finish_of(engine, 2) == (FinishReason.ABORT, ErrorCode.QUEUE_FULL)
        assert engine.outputs[1] == WHOLE[4:8] and engine.finishes[0].reason is not FinishReason.ABORT

    def test_waiting_timeout_does_not_apply_to_a_resumed_request(self) -> None:
        engine = make(max_running_requests=1, waiting_timeout_s=0.1)
        engine.submit(0, PROMPT, max_new_tokens=40, ignore_eos=True)
        engine.turn()
        engine.submit(1, PROMPT, output=WHOLE[:4], max_new_tokens=8, ignore_eos=True)
        engine.submit(2, PROMPT, max_new_tokens=8)
        engine.drain()
        assert finish_of(engine, 2) == (FinishReason.ABORT, ErrorCode.TIMEOUT)
        assert engine.outputs[1] == WHOLE[4:8]

    def test_grammar_of_a_resumed_request_is_submitted_again_when_the_compiler_is_full(self) -> None:
        grammar = spec(1, 17)
        whole, _ = undisturbed(max_new_tokens=24, grammar=grammar)
        engine = make()
        engine.submit(0, PROMPT, output=whole[:6], max_new_tokens=24, grammar=grammar)
        engine.submit(1, PROMPT, max_new_tokens=24, grammar=grammar)
        for _ in range(2):
            engine.book.pending.clear()
            engine.core.grammar_failed(grammar, "busy", engine.now, busy=True)
            engine.check()
            engine.turn()
            assert not engine.book.pending, "the grammar is submitted again only after a pause"
            engine.now += 0.3
            engine.turn()
            assert grammar in engine.book.pending
        engine.drain()
        assert finish_of(engine, 1) == (FinishReason.ABORT, ErrorCode.QUEUE_FULL)
        assert engine.outputs[0] == whole[6:]

    def test_resumed_request_can_be_aborted_while_the_compiler_is_full(self) -> None:
        grammar = spec(1, 17)
        engine = make()
        engine.submit(0, PROMPT, output=WHOLE[:1], max_new_tokens=24, grammar=grammar)
        engine.core.grammar_failed(grammar, "busy", engine.now, busy=True)
        engine.abort(0)
        engine.now += 0.3
        engine.drain()
        assert finish_of(engine, 0) == (FinishReason.ABORT, ErrorCode.CANCELLED)

    def test_resumed_request_ends_when_the_grammar_fails(self) -> None:
        grammar = spec(1, 17)
        engine = make()
        engine.submit(0, PROMPT, output=WHOLE[:1], max_new_tokens=24, grammar=grammar)
        engine.core.grammar_failed(grammar, "bad", engine.now)
        assert engine.core.idle
        engine.drain()
        assert finish_of(engine, 0) == INVALID

    def test_request_timeout_applies_to_a_resumed_request(self) -> None:
        engine = make(max_running_requests=1)
        engine.submit(0, PROMPT, max_new_tokens=90, ignore_eos=True)
        engine.turn()
        engine.submit(1, PROMPT, output=WHOLE[:4], max_new_tokens=8, timeout_s=0.1)
        engine.drain()
        assert finish_of(engine, 1) == (FinishReason.ABORT, ErrorCode.TIMEOUT)

    def test_generated_tokens_exclude_the_earlier_output_of_a_resumed_request(self) -> None:
        engine = resumed(WHOLE[:10], max_new_tokens=24, ignore_eos=True)
        assert engine.core.stats().generated_tokens_total == 14
        assert engine.core.stats().prompt_tokens_total == len(PROMPT)
        assert engine.core.stats().resumed_total == 1

    def test_cached_tokens_exclude_the_earlier_output_of_a_resumed_request(self) -> None:
        engine = make()
        engine.submit(0, PROMPT, max_new_tokens=24, ignore_eos=True)
        engine.drain()
        engine.submit(1, PROMPT, output=WHOLE[:12], max_new_tokens=24, ignore_eos=True)
        engine.drain()
        admitted = [event.detail for event in engine.control.trace("r1") if event.kind is TraceKind.ADMITTED]
        assert admitted == [16] and engine.finishes[1].cached_tokens == len(PROMPT)
        engine.check_answer(1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("output", "more", "error"),
        [
            ([1], {"session": SessionTurn("s")}, ErrorCode.INVALID_ARGUMENT),
            ([1], {"params": SamplingParams(1, embedding=EmbeddingParams())}, ErrorCode.INVALID_ARGUMENT),
            ([1] * 123, {}, ErrorCode.INVALID_ARGUMENT),
            ([1] * 91, {}, ErrorCode.OUT_OF_MEMORY),
        ],
        ids=["session", "embedding", "context", "pool"],
    )
    def test_refusal_of_a_resumed_request_names_the_invalid_field(
        self, output: list[int], more: dict[str, Any], error: ErrorCode
    ) -> None:
        engine = make(num_pages=24)
        assert not engine.core.open_session("s", 0, 0.0, 0.0)
        values: dict[str, Any] = {"params": SamplingParams(100), **more}
        ids = np.array(PROMPT, dtype=np.int32)
        engine.core.submit(Submit(0, 0, "r0", ids, values.pop("params"), output_ids=tuple(output), **values), 0.0)
        assert engine.core.idle and not engine.core.sessions.running_turns()
        (output,) = engine.core.take_output()
        finish = output.finishes[0]
        assert finish.error is error
        assert finish.field == "output_ids" or error is ErrorCode.OUT_OF_MEMORY
