"""Rules for experts: the record of the rows that each expert computed, and the routed experts of single requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.experts import ExpertDistribution, ExpertShape
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, SessionTurn
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, ScoreParams
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation
from rootstock_llm.services.worker.exec.fake import fake_experts
from tests.all_pairs import each_value
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make

PROMPT = list(range(100, 150))
SHAPE = ExpertShape((1, 2, 5), 8, 2)


def sparse(overlap: bool = True, **changes: Any) -> Engine:
    """Returns an engine whose fake model has experts."""
    return make(overlap, experts=SHAPE, **changes)


def recorded(engine: Engine) -> ExpertDistribution:
    found = engine.control.expert_distribution()
    assert found is not None
    return found


def counts_of(engine: Engine, handle: int, first: int = 0) -> np.ndarray[Any, Any]:
    """Returns, by layer and expert, the number of times that the expert got a computed token of a complete request.

    Args:
        first: position of the first counted token.
    """
    tokens = np.array([*engine.submitted[handle].prompt_ids, *engine.outputs[handle][:-1]], dtype=np.int32)
    routed = fake_experts(tokens[first:], first, SHAPE)
    return np.array([np.bincount(routed[:, layer].ravel(), minlength=SHAPE.num_experts) for layer in range(len(SHAPE.layers))])


class TestRecord:
    @each_value(overlap=[True, False], chunk=[0, 4, 16], drafts=[0, 3])
    def test_record_counts_the_experts_of_every_computed_token_once(self, overlap: bool, chunk: int, drafts: int) -> None:
        engine = sparse(overlap, chunked_prefill_size=chunk, max_drafts=drafts, enable_mixed_chunk=True)
        engine.control.start_expert_record()
        engine.submit(0, PROMPT, max_new_tokens=20, ignore_eos=True)
        engine.submit(1, [7] * 9, max_new_tokens=13, ignore_eos=True)
        engine.drain()
        found = recorded(engine)
        assert found.rows.tolist() == (counts_of(engine, 0) + counts_of(engine, 1)).tolist()
        assert found.num_tokens == 50 + 19 + 9 + 12
        assert found.rows.sum() == found.num_tokens * SHAPE.ids_per_token
        assert bool(drafts) == (engine.core.stats().drafted_tokens_total > engine.core.stats().accepted_tokens_total)

    def test_record_does_not_count_tokens_with_a_prefix_hit(self) -> None:
        engine = sparse()
        engine.submit(9, PROMPT, max_new_tokens=1)
        engine.drain()
        engine.control.start_expert_record()
        engine.submit(0, PROMPT, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert engine.finishes[0].cached_tokens == 48
        assert recorded(engine).rows.tolist() == counts_of(engine, 0, first=48).tolist()

    def test_record_has_only_the_steps_between_start_and_stop(self) -> None:
        engine = sparse(overlap=False)
        engine.submit(0, PROMPT[:4], max_new_tokens=30, ignore_eos=True)
        for _ in range(5):
            engine.turn()
        assert engine.control.expert_distribution() is None
        assert not any(plan.counts_experts for plan in engine.plans), "steps without a record count no experts"
        engine.control.start_expert_record()
        for _ in range(7):
            engine.turn()
        engine.control.stop_expert_record()
        engine.drain()
        found = recorded(engine)
        assert found.num_tokens == 7 and not found.is_running
        assert [plan.counts_experts for plan in engine.plans].count(True) == 7

    def test_record_includes_the_step_in_flight_at_the_stop(self) -> None:
        engine = sparse()
        engine.control.start_expert_record()
        engine.submit(0, PROMPT[:4], max_new_tokens=1)
        engine.turn()
        engine.control.stop_expert_record()
        assert recorded(engine).num_tokens == 0
        engine.drain()
        assert recorded(engine).num_tokens == 4

    def test_second_record_begins_with_counts_of_zero(self) -> None:
        engine = sparse()
        engine.control.start_expert_record()
        engine.submit(0, PROMPT, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        before = recorded(engine)
        engine.submit(1, [7] * 9, max_new_tokens=1)
        engine.drain()
        assert before.rows.sum() == 53 * SHAPE.ids_per_token < recorded(engine).rows.sum(), "a distribution is a copy"
        engine.control.stop_expert_record()
        engine.control.start_expert_record()
        assert recorded(engine).num_tokens == 0 == recorded(engine).rows.sum()

    def test_balancedness_is_the_mean_over_the_layers_of_the_mean_count_divided_by_the_largest(self) -> None:
        engine = sparse()
        assert engine.core.stats().expert_balancedness == 0.0
        engine.control.start_expert_record()
        engine.submit(0, PROMPT[:3], max_new_tokens=1)
        engine.drain()
        rows = counts_of(engine, 0)
        wanted = sum(layer.sum() / SHAPE.num_experts / layer.max() for layer in rows) / len(SHAPE.layers)
        assert engine.core.stats().expert_balancedness == pytest.approx(wanted)
        assert 0 < wanted < 1


class TestRoutedExperts:
    @pytest.mark.by_day(one_in=3, seed=1)
    @each_value(overlap=[True, False], chunk=[0, 4, 16], first=[0, 17, 50], drafts=[0, 3], interval=[1, 7])
    def test_each_computed_token_has_its_experts_once(
        self, overlap: bool, chunk: int, first: int, drafts: int, interval: int
    ) -> None:
        engine = sparse(overlap, chunked_prefill_size=chunk, max_drafts=drafts, enable_mixed_chunk=True)
        options: dict[str, Any] = {"stream_interval": interval, "max_new_tokens": 20, "ignore_eos": True}
        engine.submit(0, PROMPT, routed_from=first, **options)
        engine.submit(1, [7] * 9, **options)
        engine.submit(2, range(30), stream=False, routed_from=0, **options)
        engine.drain()
        engine.check_answer(0)
        engine.check_answer(2)
        assert 1 not in engine.routed

    def test_uncut_prompt_above_the_chunk_budget_has_all_experts(self) -> None:
        """Covers the fault of sglang #26860: a buffer of captured experts with the size of a chunk.

        A prompt that is computed in one larger step does not fit into such a buffer.
        """
        engine = sparse(chunked_prefill_size=0, max_prefill_tokens=16)
        engine.submit(0, range(100), max_new_tokens=3, ignore_eos=True, routed_from=0)
        engine.drain()
        assert engine.plans[0].num_tokens.tolist() == [100]
        engine.check_answer(0)

    def test_last_prompt_token_has_its_experts_when_no_token_is_sampled(self) -> None:
        """Covers the fault of sglang #20964: cutting the experts of the last token in all cases.

        The last token is not computed if it was sampled. A request without output ends with a prompt token, which is computed.
        """
        engine = sparse(chunked_prefill_size=16)
        engine.submit(0, PROMPT, max_new_tokens=0, routed_from=0)
        engine.submit(1, PROMPT, max_new_tokens=1, routed_from=0)
        engine.drain()
        assert [sum(map(len, engine.routed[handle])) for handle in (0, 1)] == [50, 50]
        engine.check_answer(0)
        engine.check_answer(1)

    def test_experts_of_output_tokens_belong_to_each_position(self) -> None:
        """Covers the faults of sglang #12162: too few experts in the output, or copies of one token's experts.

        The causes were a token count of the last prefill, and captured decode steps that do not write their experts.
        """
        engine = sparse()
        engine.submit(0, PROMPT[:6], max_new_tokens=40, ignore_eos=True, routed_from=6)
        engine.drain()
        engine.check_answer(0)
        got = np.concatenate(engine.routed[0])
        assert len(got) == 39 and len({ids.tobytes() for ids in got}) > 4

    @pytest.mark.parametrize(("first", "cached"), [(0, 0), (4, 4), (19, 16), (48, 48), (50, 48)])
    def test_cached_prefix_ends_before_the_first_token_with_routed_experts(self, first: int, cached: int) -> None:
        engine = sparse()
        engine.submit(9, PROMPT, max_new_tokens=1)
        engine.drain()
        engine.submit(0, PROMPT, max_new_tokens=4, ignore_eos=True, routed_from=first)
        engine.drain()
        engine.check_answer(0)
        assert engine.finishes[0].cached_tokens == cached

    @pytest.mark.by_day(one_in=2, seed=2)
    @each_value(overlap=[True, False], first=[0, 20, 49], every=[1, 2, 3], drafts=[0, 3], interval=[1, 7])
    def test_routed_experts_of_each_position_are_returned_once_when_requests_are_retracted(
        self, overlap: bool, first: int, every: int, drafts: int, interval: int
    ) -> None:
        engine = sparse(overlap, retract_interval=every, enable_mixed_chunk=True, chunked_prefill_size=8, max_drafts=drafts)
        engine.submit(9, [7] * 8, max_new_tokens=60, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        options: dict[str, Any] = {"stream_interval": interval, "max_new_tokens": 20, "ignore_eos": True}
        engine.submit(0, PROMPT, routed_from=first, **options)
        engine.drain()
        engine.check_answer(0)
        assert engine.core.stats().retractions_total > 3

    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("turns", [1, 3, 6, 9])
    def test_routed_experts_of_each_position_are_returned_once_when_the_request_is_preempted(self, turns: int) -> None:
        engine = sparse(enable_priority_scheduling=True, max_running_requests=1, chunked_prefill_size=8)
        engine.submit(0, PROMPT, max_new_tokens=9, ignore_eos=True, routed_from=0)
        for _ in range(turns):
            engine.turn()
        engine.submit(1, [7] * 8, priority=1, max_new_tokens=2)
        engine.drain()
        assert engine.finishes[0].retractions == 1
        engine.check_answer(0)

    @pytest.mark.parametrize("cached", [False, True])
    def test_resumed_request_returns_the_routed_experts_after_those_of_the_first_worker(self, cached: bool) -> None:
        options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
        whole = sparse()
        whole.submit(0, PROMPT, routed_from=10, **options)
        whole.drain()
        output = whole.outputs[0]
        for cut in (1, 7, 19):
            engine = sparse()
            if cached:
                engine.submit(9, [*PROMPT, *output], max_new_tokens=1)
                engine.drain()
            engine.submit(0, PROMPT, output=output[:cut], routed_from=50 + cut - 1, **options)
            engine.drain()
            engine.check_answer(0)
            assert 10 + len(np.concatenate(whole.routed[0])) == 50 + 19

    def test_output_has_no_experts_of_draft_tokens_after_the_end(self) -> None:
        for length in range(2, 12):
            engine = sparse(max_drafts=5)
            engine.submit(9, PROMPT, max_new_tokens=length, ignore_eos=True)
            engine.drain()
            engine.submit(0, PROMPT, max_new_tokens=40, stop_token_ids=(engine.outputs[9][-1],), ignore_eos=True, routed_from=0)
            engine.drain()
            engine.check_answer(0)

    def test_output_of_a_grammar_has_the_experts_of_every_token_but_the_last(self) -> None:
        engine = sparse()
        engine.submit(0, PROMPT, max_new_tokens=30, ignore_eos=True, grammar=spec(1, 17), routed_from=0)
        engine.drain()
        engine.check_answer(0)

    def test_request_returns_no_routed_experts_when_its_sampled_token_is_outside_the_vocabulary(self) -> None:
        engine = sparse(overlap=False)
        engine.submit(0, PROMPT[:4], max_new_tokens=9, ignore_eos=True, routed_from=0)
        for _ in range(2):
            engine.turn()
        assert engine.prev is not None and engine.prev.plan.routed_rows.tolist() == [0]
        result = engine.executor.wait(engine.prev)
        assert [len(ids) for ids in result.routed_experts.values()] == [1]
        engine.core.commit(replace(result, tokens=np.array([1000], dtype=np.int32)), engine.now)
        (output,) = engine.core.take_output()
        assert [finish.error for finish in output.finishes] == [ErrorCode.INTERNAL]
        assert not output.routed_experts

    def test_experts_of_a_prompt_are_sent_after_each_chunk(self) -> None:
        engine = sparse(chunked_prefill_size=16)
        engine.submit(0, PROMPT, max_new_tokens=30, ignore_eos=True, routed_from=0)
        for _ in range(5):
            engine.turn()
        assert [len(ids) for ids in engine.routed[0]][:3] == [16, 16, 16]

    @pytest.mark.parametrize(
        "options",
        [
            {"embedding": EmbeddingParams()},
            {"score": ScoreParams((3,))},
            {"hand_over": KvReservation(1, 1, bytes(16))},
            {"session": SessionTurn("s")},
            {"routed_from": 51},
        ],
        ids=["embedding", "score", "handover", "session", "position"],
    )
    def test_request_for_experts_is_refused_when_it_cannot_return_them(self, options: dict[str, Any]) -> None:
        engine = sparse()
        engine.open_session("s")
        engine.submit(0, PROMPT, **{"max_new_tokens": 1, "routed_from": 0, **options})
        engine.turn()
        finish = engine.finishes[0]
        assert (finish.reason, finish.error) == (FinishReason.ABORT, ErrorCode.INVALID_ARGUMENT)
        assert finish.field == "routed_experts_from"
