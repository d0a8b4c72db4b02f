"""Rules for logprobs of prompts and outputs, and for embeddings, with cut, cached and retracted prompts."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, RowFault
from tests.all_pairs import each_value
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make

PROMPT = list(range(100, 150))


def prompt_logprobs(engine: Engine, handle: int, first: int, prompt: list[int] | None = None) -> list[float]:
    """Runs a request and returns its prompt logprobs. The fake executor's logprob is the negative token id."""
    prompt = prompt or PROMPT
    engine.submit(handle, prompt, max_new_tokens=4, ignore_eos=True, prompt_logprobs_from=first)
    engine.drain()
    engine.check_answer(handle)
    return engine.prompt_logprobs.get(handle, [])


def wanted(first: int) -> list[float]:
    return [-float(token) for token in PROMPT[max(first, 1) :]]


class TestPromptLogprobs:
    @pytest.mark.by_day(one_in=2, seed=9)
    @pytest.mark.parametrize(
        ("overlap", "chunk", "first"),
        [
            *((True, 0, 0), (False, 0, 1), (False, 0, 49)),
            *((True, 4, 1), (False, 4, 2), (True, 4, 17), (False, 4, 49)),
            *((False, 32, 0), (True, 32, 16), (False, 32, 17)),
        ],
    )
    def test_prompt_logprobs_are_complete_when_the_prompt_is_cut_into_chunks(self, overlap: bool, chunk: int, first: int) -> None:
        engine = make(overlap, chunked_prefill_size=chunk)
        assert prompt_logprobs(engine, 0, first) == wanted(first)

    @pytest.mark.parametrize("budget", [4, 40])
    def test_prompt_logprobs_do_not_depend_on_the_logprob_budget(self, budget: int) -> None:
        engine = make(max_prompt_logprob_tokens=budget, chunked_prefill_size=0)
        assert prompt_logprobs(engine, 0, 0) == wanted(0)

    @pytest.mark.parametrize(("first", "cached"), [(0, 0), (4, 0), (5, 4), (20, 16), (49, 48)])
    def test_cached_prefix_ends_before_the_first_token_with_a_prompt_logprob(self, first: int, cached: int) -> None:
        engine = make()
        engine.submit(9, PROMPT, max_new_tokens=1)
        engine.drain()
        assert prompt_logprobs(engine, 0, first) == wanted(first)
        assert engine.finishes[0].cached_tokens == cached

    @pytest.mark.by_day(one_in=2)
    @each_value(first=[0, 20, 49], every=[1, 2, 3])
    def test_prompt_logprobs_are_complete_under_retraction(self, first: int, every: int) -> None:
        engine = make(retract_interval=every, enable_mixed_chunk=True, chunked_prefill_size=8)
        engine.submit(9, [7] * 8, max_new_tokens=60, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        assert prompt_logprobs(engine, 0, first) == wanted(first)
        assert engine.core.stats().retractions_total > 3

    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("turns", [1, 3, 6])
    def test_prompt_logprobs_are_complete_under_preemption(self, turns: int) -> None:
        engine = make(enable_priority_scheduling=True, max_running_requests=1, chunked_prefill_size=8)
        engine.submit(0, PROMPT, max_new_tokens=4, ignore_eos=True, prompt_logprobs_from=0)
        for _ in range(turns):
            engine.turn()
        engine.submit(1, [7] * 8, priority=1, max_new_tokens=2)
        engine.drain()
        assert engine.finishes[0].retractions == 1
        assert engine.prompt_logprobs[0] == wanted(0)

    def test_prompt_logprobs_are_sent_after_each_chunk(self) -> None:
        engine = make(chunked_prefill_size=16)
        engine.submit(0, PROMPT, max_new_tokens=30, ignore_eos=True, prompt_logprobs_from=0)
        seen = []
        for _ in range(6):
            engine.turn()
            seen.append(len(engine.prompt_logprobs.get(0, [])))
        assert seen[-1] == 49 and sorted(seen) == seen and len(set(seen)) > 3, "the values arrive in several messages, in order"


class TestOutputLogprobs:
    @pytest.mark.by_day(one_in=3, seed=1)
    @pytest.mark.parametrize(
        ("changes", "stream", "interval"),
        [
            ({}, True, 1),
            ({"retract_interval": 2}, True, 7),
            ({"retract_interval": 2}, False, 1),
            ({"enable_mixed_chunk": True}, True, 7),
            ({"enable_mixed_chunk": True}, True, 1),
        ],
    )
    def test_output_logprobs_match_the_output_tokens(self, changes: dict[str, Any], stream: bool, interval: int) -> None:
        engine = make(**changes)
        engine.submit(0, PROMPT, stream=stream, stream_interval=interval, max_new_tokens=60, top_logprobs=2)
        engine.submit(1, [3] * 9, max_new_tokens=60)
        engine.drain()
        assert engine.logprobs[0] == [-float(token) for token in engine.outputs[0]] and engine.outputs[0]
        assert 1 not in engine.logprobs


def embed(engine: Engine, handle: int, prompt: list[int]) -> None:
    engine.submit(handle, prompt, embedding=EmbeddingParams(), max_new_tokens=1)
    engine.drain()
    engine.check_answer(handle)


class TestEmbeddings:
    @pytest.mark.by_day(one_in=2)
    @each_value(chunk=[0, 4, 16], overlap=[True, False])
    def test_embedding_request_ends_after_the_prompt_and_has_no_output(self, overlap: bool, chunk: int) -> None:
        engine = make(overlap, chunked_prefill_size=chunk)
        embed(engine, 0, PROMPT)
        assert engine.finishes[0].reason is FinishReason.EMBEDDED
        assert not any(plan.num_rows - plan.num_extend for plan in engine.plans), "no step has decode rows"

    def test_several_embedding_requests_share_one_step(self) -> None:
        engine = make(chunked_prefill_size=64)
        for handle in range(8):
            engine.submit(handle, [handle] * 8, embedding=EmbeddingParams(), max_new_tokens=1)
        engine.drain()
        assert [plan.num_extend for plan in engine.plans] == [8]
        for handle in range(8):
            engine.check_answer(handle)

    @pytest.mark.parametrize(("reuses", "cached"), [(True, 48), (False, 0)])
    def test_embedding_uses_a_cached_prefix_when_the_pooling_allows_reuse(self, reuses: bool, cached: int) -> None:
        engine = make(pooling_reuses_prefix=reuses)
        embed(engine, 0, PROMPT)
        embed(engine, 1, PROMPT)
        assert engine.finishes[1].cached_tokens == cached

    def test_generation_reuses_the_cached_pages_of_an_embedding_request(self) -> None:
        engine = make(pooling_reuses_prefix=False)
        embed(engine, 0, PROMPT)
        engine.submit(1, PROMPT, max_new_tokens=4)
        engine.drain()
        assert engine.finishes[1].cached_tokens == 48

    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("reuses", [True, False])
    def test_embedding_is_correct_when_another_request_is_retracted(self, reuses: bool) -> None:
        engine = make(pooling_reuses_prefix=reuses, retract_interval=1, chunked_prefill_size=4, enable_mixed_chunk=True)
        engine.submit(9, [7] * 8, max_new_tokens=40, ignore_eos=True)
        embed(engine, 0, PROMPT)
        assert engine.finishes[0].reason is FinishReason.EMBEDDED
        assert engine.core.stats().retractions_total > 0

    def test_fault_in_one_row_ends_only_that_embedding_request(self) -> None:
        engine = make(chunked_prefill_size=0)
        engine.executor.row_faults = {1: {0: RowFault.NAN_LOGITS}}
        engine.submit(0, PROMPT, embedding=EmbeddingParams(), max_new_tokens=1)
        engine.submit(1, [5] * 8, embedding=EmbeddingParams(), max_new_tokens=1)
        engine.drain()
        assert engine.finishes[0].error is ErrorCode.INTERNAL
        engine.check_answer(1)
