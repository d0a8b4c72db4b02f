"""Rules for requests with a grammar: the gate, masks and forced tokens (docs/design/scheduler.md#gates)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.scheduler import Scheduler
from tests.all_pairs import each_pair, each_value
from tests.core.fake_grammar import PositionMatcher, spec
from tests.core.harness import Engine, LetterDecoder
from tests.core.test_scheduler_basic import make


class TestGate:
    def test_grammar_gate_keeps_a_request_until_the_grammar_is_compiled(self) -> None:
        engine = make()
        engine.submit(0, [1] * 8, max_new_tokens=20, grammar=spec(1, 12))
        for _ in range(5):
            engine.turn()
        assert not engine.plans and engine.core.stats().num_gated == 1
        engine.compile()
        assert engine.core.stats().num_gated == 0
        engine.drain()
        engine.check_answer(0)
        stats = engine.core.stats()
        assert (stats.grammars_total, stats.grammar_hits_total, stats.grammar_aborts_total) == (1, 0, 0), (
            "a wait for the compilation is no cache hit"
        )

    def test_grammar_gate_delays_no_other_request(self) -> None:
        engine = make(max_running_requests=1)
        engine.submit(0, [1] * 8, max_new_tokens=20, grammar=spec(1, 12))
        for handle in range(1, 5):
            engine.submit(handle, [handle] * 8, max_new_tokens=3, ignore_eos=True)
        for _ in range(40):
            engine.turn()
        assert sorted(engine.finishes) == [1, 2, 3, 4]

    def test_grammar_gate_admits_a_request_when_the_grammar_is_compiled(self) -> None:
        engine = make()
        engine.book.ready.add(spec(1, 12))
        engine.submit(0, [1] * 8, max_new_tokens=20, grammar=spec(1, 12))
        engine.submit(1, [1] * 8, max_new_tokens=20)
        stats = engine.core.stats()
        assert (stats.num_gated, stats.grammars_total, stats.grammar_hits_total) == (0, 1, 1)

    def test_grammar_gate_admits_all_requests_of_a_compiled_grammar(self) -> None:
        engine = make()
        for handle in range(3):
            engine.submit(handle, [handle] * 8, max_new_tokens=20, grammar=spec(1, 12))
        engine.submit(3, [3] * 8, max_new_tokens=20, grammar=spec(2, 12))
        assert len(engine.book.pending) == 2
        engine.compile()
        assert (engine.core.stats().num_gated, engine.core.stats().num_waiting) == (1, 4)

    def test_grammar_gate_compiles_again_when_a_grammar_was_dropped(self) -> None:
        engine = make()
        engine.submit(0, [1] * 8, max_new_tokens=20, grammar=spec(1, 12))
        del engine.book.pending[spec(1, 12)]
        engine.core.grammar_ready(spec(1, 12))
        assert engine.core.stats().num_gated == 1 and spec(1, 12) in engine.book.pending
        engine.drain()
        engine.check_answer(0)

    def test_failed_grammar_ends_requests_with_the_compilers_reason(self) -> None:
        engine = make()
        for handle in range(2):
            engine.submit(handle, [handle] * 8, max_new_tokens=20, grammar=spec(1, 12))
        engine.submit(2, [2] * 8, max_new_tokens=20, grammar=spec(2, 12))
        del engine.book.pending[spec(1, 12)]
        engine.core.grammar_failed(spec(1, 12), "unexpected ( at 3", engine.now)
        engine.drain()
        for handle in range(2):
            finish = engine.finishes[handle]
            assert (finish.reason, finish.error) == (FinishReason.ABORT, ErrorCode.INVALID_ARGUMENT)
            assert finish.message == "unexpected ( at 3"
        assert engine.core.stats().grammar_aborts_total == 2
        engine.check_answer(2)

    def test_request_that_waits_for_a_grammar_can_be_aborted(self) -> None:
        engine = make()
        engine.submit(0, [1] * 8, max_new_tokens=20, grammar=spec(1, 12))
        engine.abort(0)
        engine.compile()
        engine.drain()
        assert engine.finishes[0].error is ErrorCode.CANCELLED and not engine.plans

    @pytest.mark.parametrize("limit", [{"waiting_timeout_s": 0.05}, {"timeout_s": 0.05}], ids=["of waiting", "of the request"])
    def test_request_that_waits_for_a_grammar_times_out(self, limit: dict[str, float]) -> None:
        engine = make(waiting_timeout_s=limit.get("waiting_timeout_s", 0.0))
        engine.submit(0, [1] * 8, max_new_tokens=20, grammar=spec(1, 12), timeout_s=limit.get("timeout_s", 0.0))
        for _ in range(10):
            engine.turn()
        assert engine.finishes[0].error is ErrorCode.TIMEOUT and engine.core.stats().num_gated == 0

    def test_grammar_is_refused_when_the_worker_offers_no_structured_output(self) -> None:
        core = Scheduler(make().config, LetterDecoder())
        core.submit(Submit(0, 0, "r", np.ones(4, dtype=np.int32), SamplingParams(5, grammar=spec(1, 4))), 0.0)
        (output,) = core.take_output()
        assert output.finishes[0].error is ErrorCode.INVALID_ARGUMENT


class TestMasks:
    def test_only_sampled_rows_with_a_grammar_have_a_mask(self) -> None:
        engine = make()
        engine.book.ready.add(spec(1, 40))
        engine.submit(0, [1] * 8, max_new_tokens=40, ignore_eos=True)
        engine.submit(1, [2] * 20, max_new_tokens=40, grammar=spec(1, 40), top_logprobs=0)
        engine.drain()
        masked_slot = next(params.slot for plan in engine.plans for params in plan.admitted if params.params.grammar)
        masked = {slot for plan in engine.plans for slot in plan.slots[plan.mask_rows].tolist()}
        assert masked == {masked_slot}
        assert all(plan.sample[plan.mask_rows].all() for plan in engine.plans), (
            "only sampled rows have a mask, so chunks before the last one have none"
        )
        engine.check_answer(0)
        engine.check_answer(1)

    @pytest.mark.parametrize(("fault", "error"), [("", ErrorCode.INTERNAL), ("too deep", ErrorCode.INVALID_ARGUMENT)])
    def test_refused_token_ends_only_the_request_with_that_grammar(
        self, monkeypatch: pytest.MonkeyPatch, fault: str, error: ErrorCode
    ) -> None:
        engine = make()
        engine.book.ready.add(spec(1, 40))
        engine.submit(0, [1] * 8, max_new_tokens=10, ignore_eos=True)
        engine.submit(1, [2] * 8, max_new_tokens=40, grammar=spec(1, 40))
        monkeypatch.setattr(PositionMatcher, "accept", lambda matcher, token: False)
        monkeypatch.setattr(PositionMatcher, "fault", fault)
        engine.drain()
        assert engine.finishes[1].error is error and fault in engine.finishes[1].message
        engine.check_answer(0)


def answers(overlap: bool, jump: bool, config: dict[str, Any], **params: Any) -> tuple[Engine, list[int]]:
    """Returns the engine and the output of one request.

    Without `jump`, the request asks for logprobs, so that each token is sampled.
    """
    engine = make(overlap, **config)
    engine.submit(0, [1] * 9, top_logprobs=-1 if jump else 0, **params)
    engine.submit(1, [2] * 9, max_new_tokens=30, ignore_eos=True)
    engine.drain()
    engine.check_answer(0)
    engine.check_answer(1)
    return engine, engine.outputs[0]


# In spec(0, 40), output positions 0 to 3 are forced, the next four are sampled, and so on; in spec(1, n), 8 to 15 are forced.
# Positions that are not in this list run the same code.
IN_AND_AROUND_RUNS = [1, 4, 5, 7, 8, 12]
OVERLAP = [True, False]


class TestForcedTokens:
    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_forced_tokens_save_steps_without_changing_the_output(self, overlap: bool) -> None:
        with_jumps, jumped = answers(overlap, True, {}, max_new_tokens=60, grammar=spec(0, 40))
        without, sampled = answers(overlap, False, {}, max_new_tokens=60, grammar=spec(0, 40))
        assert jumped == sampled and len(jumped) == 40
        assert len(with_jumps.plans) < len(without.plans) - 5

    @pytest.mark.by_day(one_in=2, seed=20)
    @each_pair(interval=[1, 2, 5], mixed={"mixed": True, "apart": False}, overlap=OVERLAP)
    def test_forced_tokens_are_correct_under_retraction(self, interval: int, mixed: bool, overlap: bool) -> None:
        config = {"retract_interval": interval, "enable_mixed_chunk": mixed}
        engine, jumped = answers(overlap, True, config, max_new_tokens=60, grammar=spec(0, 40))
        assert len(jumped) == 40 and engine.core.stats().retractions_total > 0

    @pytest.mark.by_day(one_in=2, seed=33)
    @each_value(max_new=IN_AND_AROUND_RUNS, overlap=OVERLAP)
    def test_forced_tokens_stop_at_max_new_tokens(self, max_new: int, overlap: bool) -> None:
        engine, jumped = answers(overlap, True, {}, max_new_tokens=max_new, grammar=spec(0, 40))
        assert engine.finishes[0].reason is FinishReason.LENGTH and len(jumped) == max_new

    @pytest.mark.by_day(one_in=2, seed=49)
    @each_value(grammar=[*((0, length) for length in IN_AND_AROUND_RUNS), (0, 2), (1, 9), (1, 12)], overlap=OVERLAP)
    def test_forced_tokens_stop_at_the_end_of_the_grammar(self, grammar: tuple[int, int], overlap: bool) -> None:
        seed, length = grammar
        engine, jumped = answers(overlap, True, {}, max_new_tokens=60, grammar=spec(seed, length))
        assert engine.finishes[0].reason is FinishReason.MATCHED_TOKEN and len(jumped) == length

    @pytest.mark.by_day(one_in=2, seed=28)
    @each_value(at=IN_AND_AROUND_RUNS, overlap=OVERLAP)
    def test_forced_tokens_stop_at_a_stop_string(self, at: int, overlap: bool) -> None:
        _, whole = answers(overlap, True, {}, max_new_tokens=60, grammar=spec(0, 40))
        stop = LetterDecoder().decode(whole[at - 1 : at + 1])
        engine, cut = answers(overlap, True, {}, max_new_tokens=60, grammar=spec(0, 40), stop=(stop,))
        assert engine.finishes[0].reason is FinishReason.MATCHED_STRING and engine.finishes[0].matched_stop == stop
        assert cut == whole[: len(cut)] and len(cut) <= at + 1

    @pytest.mark.by_day(one_in=2, seed=10)
    @each_value(at=IN_AND_AROUND_RUNS, overlap=OVERLAP[::-1])
    def test_forced_tokens_stop_at_a_stop_token(self, at: int, overlap: bool) -> None:
        _, whole = answers(overlap, True, {}, max_new_tokens=60, grammar=spec(0, 40))
        engine, cut = answers(overlap, True, {}, max_new_tokens=60, grammar=spec(0, 40), stop_token_ids=(whole[at],))
        assert engine.finishes[0].matched_token == whole[at] and cut == whole[: whole.index(whole[at]) + 1]

    @pytest.mark.by_day(one_in=3, seed=30)
    @each_value(abort_after=[1, 2, 3, 5, 7], overlap=OVERLAP)
    def test_abort_between_forced_tokens_leaks_no_page(self, abort_after: int, overlap: bool) -> None:
        engine = make(overlap)
        engine.book.ready.add(spec(0, 40))
        engine.submit(0, [1] * 9, max_new_tokens=60, grammar=spec(0, 40))
        for _ in range(abort_after):
            engine.turn()
        engine.abort(0)
        engine.drain()
        assert engine.core.memory.num_leased == 0
        engine.check_answer(0)

    @each_value(
        params={
            "logprobs": {"top_logprobs": 0},
            "frequency": {"frequency_penalty": 0.5},
            "repetition": {"repetition_penalty": 1.1},
            "banned": {"banned_token_ids": (250,)},
            "allowed": {"allowed_token_ids": tuple(range(256))},
            "bias": {"logit_bias": ((250, 1.0),)},
        },
        overlap=OVERLAP,
    )
    def test_no_token_is_forced_when_parameters_require_sampling(self, params: dict[str, Any], overlap: bool) -> None:
        engine = make(overlap)
        engine.submit(0, [1] * 9, max_new_tokens=60, grammar=spec(0, 40), **params)
        engine.drain()
        assert sum(plan.num_extend for plan in engine.plans) == 1
        engine.check_answer(0)
