"""Requests that end with their prompt: scores, and requests with max_new_tokens 0. They reserve no KV for output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, SessionTurn
from rootstock_llm.services.worker.core.contracts.plan import RowFault, ScoreParams
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation
from tests.all_pairs import each_value
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make

PROMPT = list(range(100, 150))
SCORE: dict[str, Any] = {"max_new_tokens": 0, "score": ScoreParams((4, 9, 4))}
NONE: dict[str, Any] = {"max_new_tokens": 0}
GENERATING: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}


def ask(engine: Engine, handle: int, prompt: list[int], **params: Any) -> FinishReason:
    engine.submit(handle, prompt, **params)
    engine.drain()
    engine.check_answer(handle)
    return engine.finishes[handle].reason


class TestEnd:
    @each_value(chunk=[0, 4, 16], overlap=[True, False])
    def test_score_request_ends_with_the_prompt_when_prompts_are_cut_into_chunks(self, overlap: bool, chunk: int) -> None:
        engine = make(overlap, chunked_prefill_size=chunk)
        assert ask(engine, 0, PROMPT, **SCORE) is FinishReason.SCORED
        assert not any(plan.num_rows - plan.num_extend for plan in engine.plans), "no step decodes"
        assert engine.core.stats().generated_tokens_total == 0

    @each_value(chunk=[0, 4, 16], overlap=[True, False])
    def test_request_gets_no_token_when_max_new_tokens_is_0(self, overlap: bool, chunk: int) -> None:
        engine = make(overlap, chunked_prefill_size=chunk)
        assert ask(engine, 0, PROMPT, **NONE, prompt_logprobs_from=3, top_logprobs=1) is FinishReason.LENGTH
        assert 0 not in engine.outputs and engine.finishes[0].completion_tokens == 0
        assert engine.prompt_logprobs[0] == [-float(token) for token in PROMPT[3:]]
        assert not any(plan.num_rows - plan.num_extend for plan in engine.plans), "no step decodes"

    @pytest.mark.parametrize("max_drafts", [0, 3])
    def test_score_requests_share_steps_with_decode_rows(self, max_drafts: int) -> None:
        engine = make(enable_mixed_chunk=True, chunked_prefill_size=8, max_drafts=max_drafts)
        engine.submit(9, [7] * 8, **GENERATING)
        for _ in range(4):
            engine.turn()
        for handle in range(4):
            engine.submit(handle, [handle, *PROMPT], **(SCORE if handle % 2 else NONE))
        engine.drain()
        for handle in (0, 1, 2, 3, 9):
            engine.check_answer(handle)
        assert engine.core.stats().generated_tokens_total == 40

    def test_grammar_fills_no_mask_when_the_request_samples_no_token(self) -> None:
        engine = make()
        assert ask(engine, 0, PROMPT, **NONE, grammar=spec(1, 5)) is FinishReason.LENGTH
        assert not any(len(plan.mask_rows) for plan in engine.plans)

    def test_session_turn_adds_only_the_prompt_when_the_turn_samples_no_token(self) -> None:
        engine = make()
        engine.open_session("s")
        assert ask(engine, 0, PROMPT, session=SessionTurn("s"), **NONE) is FinishReason.LENGTH
        engine.submit(1, [5, 6], session=SessionTurn("s"), max_new_tokens=3)
        engine.drain()
        assert engine.finishes[1].prompt_tokens == len(PROMPT) + 2

    def test_fault_in_one_row_ends_only_that_score_request(self) -> None:
        engine = make(chunked_prefill_size=0)
        engine.executor.row_faults = {1: {0: RowFault.NAN_LOGITS}}
        engine.submit(0, PROMPT, **SCORE)
        engine.submit(1, [5] * 8, **SCORE)
        engine.drain()
        assert engine.finishes[0].error is ErrorCode.INTERNAL
        engine.check_answer(1)


class TestMemory:
    def test_prompt_of_a_score_request_may_fill_the_whole_context(self) -> None:
        engine = make()
        context = engine.config.context_len
        assert ask(engine, 0, list(range(context)), **SCORE) is FinishReason.SCORED
        assert ask(engine, 1, list(range(context)), **NONE) is FinishReason.LENGTH
        engine.submit(2, list(range(context + 1)), **SCORE)
        engine.drain()
        assert engine.finishes[2].error is ErrorCode.INVALID_ARGUMENT

    def test_score_requests_run_together_when_the_pool_has_pages_for_two_prompts(self) -> None:
        """Admission keeps one token free. A token reserved for an output would make the second prompt wait."""
        engine = make(num_pages=49, page_size=1, chunked_prefill_size=0, enable_radix_cache=False)
        for handle in range(2):
            engine.submit(handle, [handle] * 24, **SCORE)
        engine.turn()
        assert engine.core.stats().num_running == 2
        engine.drain()

    @each_value(overlap=[True, False], turns=[0, 1, 2, 3])
    def test_abort_frees_the_pages_of_a_score(self, overlap: bool, turns: int) -> None:
        engine = make(overlap, chunked_prefill_size=16)
        engine.submit(0, PROMPT, **SCORE)
        for _ in range(turns):
            engine.turn()
        engine.abort(0)
        engine.drain()
        memory = engine.core.memory
        assert engine.finishes[0].error is ErrorCode.CANCELLED
        assert memory.num_leased == 0 and memory.slots.num_free == engine.config.max_running_requests

    def test_scores_are_correct_when_requests_are_retracted(self) -> None:
        engine = make(retract_interval=1, chunked_prefill_size=4, enable_mixed_chunk=True)
        engine.submit(9, [7] * 8, **GENERATING)
        for handle in range(3):
            engine.submit(handle, [handle, *PROMPT], **SCORE)
        engine.drain()
        for handle in (0, 1, 2, 9):
            engine.check_answer(handle)
        assert engine.core.stats().retractions_total > 0


class TestSharing:
    @each_value(chunk=[64, 0], slots=[4, 64], overlap=[True, False])
    def test_items_of_one_query_share_the_pages_of_the_query(self, chunk: int, slots: int, overlap: bool) -> None:
        engine = make(
            overlap, num_pages=256, page_size=16, context_len=1024, chunked_prefill_size=chunk, max_running_requests=slots
        )  # fmt: skip
        query = [token % 900 for token in range(512)]
        for handle in range(64):
            engine.submit(handle, [*query, 900 + handle, 5, 6], **SCORE)
        engine.drain()
        for handle in range(64):
            engine.check_answer(handle)
        assert sum(engine.finishes[handle].cached_tokens for handle in range(64)) >= 63 * 496


class TestRefusals:
    @pytest.mark.parametrize("what", ["output", "hand_over"])
    def test_score_request_is_refused_when_resumed_or_handed_over(self, what: str) -> None:
        engine = make()
        reservation = KvReservation(1, 1, bytes(RESERVATION_SECRET_BYTES))
        more: dict[str, Any] = {"output": [1]} if what == "output" else {"hand_over": reservation}
        engine.submit(0, PROMPT, **SCORE, **more)
        engine.drain()
        field = {"output": "output_ids", "hand_over": "hand_over"}[what]
        assert (engine.finishes[0].error, engine.finishes[0].field) == (ErrorCode.INVALID_ARGUMENT, field)

    def test_score_request_fails_when_the_step_returns_no_score(self) -> None:
        engine = make()
        engine.submit(0, PROMPT[:4], **SCORE)
        plan = engine.core.plan(engine.now)
        assert plan is not None
        run = engine.executor.forward(plan)
        engine.executor.sample(run, {})
        run.label_logprobs.clear()
        engine.core.commit(engine.executor.wait(run), engine.now)
        (output,) = engine.core.take_output()
        assert [finish.error for finish in output.finishes] == [ErrorCode.INTERNAL]
        assert np.all(plan.sample)
