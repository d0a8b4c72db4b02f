"""Rules for retraction, and for the flag batch_is_full (docs/design/scheduler.md#retraction)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, Submit
from rootstock_llm.services.worker.core.contracts.plan import ForwardMode, SamplingParams
from rootstock_llm.services.worker.core.requests.request import make_request
from rootstock_llm.services.worker.core.requests.waiting_queue import victim_order
from tests.all_pairs import each_value
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make


def crowded(overlap: bool = True, max_new: int = 24, **changes: Any) -> Engine:
    """Returns an engine with three admitted requests that need 96 tokens of KV in a pool of 64 tokens."""
    values: dict[str, Any] = {"num_pages": 16, "eos_token_ids": (), "schedule_conservativeness": 0.01, "max_extend_steps": 0}
    engine = make(overlap, **{**values, **changes})
    for handle in range(3):
        engine.submit(handle, [handle + 1] * (8 - handle), max_new_tokens=max_new)
        engine.turn()
    return engine


def turn_until_retraction(engine: Engine) -> None:
    for _ in range(200):
        if engine.core.stats().retractions_total:
            return
        engine.turn()
    raise AssertionError("no request was retracted")


class TestVictims:
    @pytest.mark.parametrize(
        ("rows", "order"),
        [
            ([(0, 5, 8), (0, 3, 8), (0, 4, 8)], [1, 2, 0]),
            ([(0, 5, 8), (0, 5, 20), (0, 5, 12)], [1, 2, 0]),
            ([(0, 9, 8), (0, 3, 2), (0, 3, 4)], [2, 1, 0]),
            ([(1, 0, 99), (0, 50, 1), (2, 0, 99)], [1, 0, 2]),
        ],
        ids=["least output first", "of equals the longest prompt", "output before prompt", "least urgent before both"],
    )
    def test_victims_are_sorted_by_urgency_then_output_length_and_then_prompt_length(
        self, rows: list[tuple[int, int, int]], order: list[int]
    ) -> None:
        """Each row is (priority, output tokens, prompt tokens)."""
        config = make(enable_priority_scheduling=True).config
        requests = []
        for handle, (priority, outputs, length) in enumerate(rows):
            ids = np.zeros(length, dtype=np.int32)
            request = make_request(Submit(0, handle, "", ids, SamplingParams(99), priority=priority), handle, config, 0.0)
            request.progress.output_ids = [1] * outputs
            requests.append(request)
        assert [r.handle for r in sorted(requests, key=victim_order)] == order

    def test_retraction_takes_the_longest_prompt_when_outputs_are_equal(self) -> None:
        engine = crowded()
        turn_until_retraction(engine)
        assert [engine.core.queues.by_key[0, handle].progress.num_retractions for handle in range(3)] == [1, 0, 0]
        stats, retracted = engine.core.stats(), engine.core.queues.by_key[0, 0]
        assert stats.retracted_input_tokens_total == 8
        in_flight = len(retracted.progress.output_ids) - stats.retracted_output_tokens_total
        assert stats.retracted_output_tokens_total > 0 and in_flight in (0, 1)

    def test_retraction_takes_a_request_whose_prompt_is_being_computed(self) -> None:
        engine = make(num_pages=16, eos_token_ids=(), schedule_conservativeness=0.01, chunked_prefill_size=4, max_extend_steps=1)
        engine.submit(0, [1] * 4, max_new_tokens=50)
        for _ in range(12):
            engine.turn()
        engine.submit(1, [2] * 40, max_new_tokens=2)
        engine.drain()
        assert engine.finishes[1].retractions > 0 and engine.finishes[0].retractions == 0
        engine.check_answer(0)
        engine.check_answer(1)


class TestRetractedRequests:
    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_retracted_requests_get_the_models_tokens(self, overlap: bool) -> None:
        engine = crowded(overlap)
        engine.drain()
        assert engine.core.stats().retractions_total > 0
        for handle in range(3):
            assert engine.finishes[handle].reason is FinishReason.LENGTH
            engine.check_answer(handle)

    def test_retracted_requests_run_before_new_requests(self) -> None:
        engine = crowded()
        turn_until_retraction(engine)
        engine.submit(9, [9] * 4, max_new_tokens=4)
        engine.drain()
        back = next(p.step_id for p in engine.plans for s in p.admitted if s.num_prompt_tokens == 8 and p.step_id > 1)
        fresh = next(p.step_id for p in engine.plans for s in p.admitted if s.num_prompt_tokens == 4)
        assert back <= fresh

    def test_retraction_computes_the_new_token_ratio_from_the_remaining_rows(self) -> None:
        engine = crowded(overlap=False, max_new=50, num_pages=20)
        turn_until_retraction(engine)
        rows = engine.core.queues.decoding
        decoded = sum(len(row.progress.output_ids) for row in rows)
        assert engine.core.stats().new_token_ratio == pytest.approx((decoded + 20 * len(rows)) / (50 * len(rows) + 1))

    def test_retraction_prevents_admission_in_the_same_step(self) -> None:
        engine = crowded()
        for _ in range(100):
            before = engine.core.stats().retractions_total
            engine.turn()
            if engine.core.stats().retractions_total > before:
                assert not engine.plans[-1].admitted


class TestLastRequest:
    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_error_of_the_last_request_names_the_pool_size_when_memory_is_exhausted(self, overlap: bool) -> None:
        engine = make(overlap, num_pages=8, eos_token_ids=(), schedule_conservativeness=0.01)
        engine.submit(0, [1] * 12, max_new_tokens=60)
        engine.submit(1, [2] * 8, max_new_tokens=12)
        engine.drain()
        finish = engine.finishes[0]
        assert (finish.reason, finish.error) == (FinishReason.ABORT, ErrorCode.OUT_OF_MEMORY)
        assert "32 tokens" in finish.message
        assert finish.completion_tokens > 12, "the request runs until it fills the pool"
        assert engine.finishes[1].reason is FinishReason.LENGTH
        engine.check_answer(0)
        engine.check_answer(1)


class TestRetractHook:
    @pytest.mark.by_day(one_in=2, seed=2)
    @each_value(every=[2, 3, 5], overlap=[True, False])
    def test_retract_interval_retracts_a_request_periodically(self, every: int, overlap: bool) -> None:
        engine = make(overlap, retract_interval=every)
        engine.submit(0, [1] * 8, max_new_tokens=60, ignore_eos=True)
        engine.drain()
        modes = "".join("E" if plan.num_extend else "D" for plan in engine.plans)
        runs = [len(run) for run in modes.split("E")]
        assert set(runs[1:-1]) == {every - 1}
        assert engine.finishes[0].retractions - (modes.count("E") - 1) in (0, 1), (
            "a retraction while the last token is in flight causes no further extend"
        )
        engine.check_answer(0)

    def test_no_request_is_retracted_when_retract_interval_is_0(self) -> None:
        engine = make(retract_interval=0)
        engine.submit(0, [1] * 8, max_new_tokens=60, ignore_eos=True)
        engine.drain()
        assert engine.core.stats().retractions_total == 0


class TestBatchIsFull:
    """The flag is set and cleared by the rules of docs/design/scheduler.md#admission-and-budgets."""

    @staticmethod
    def full(**changes: Any) -> Engine:
        """Returns an engine with two slots, two decoding requests and one waiting request."""
        engine = make(max_running_requests=2, **changes)
        for handle in range(3):
            engine.submit(handle, [handle + 1] * 4, max_new_tokens=10 + 20 * handle, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        return engine

    def test_batch_is_full_flag_is_initially_unset(self) -> None:
        assert not make().core.stats().batch_is_full

    def test_batch_is_full_flag_is_set_when_a_request_waits_for_a_slot(self) -> None:
        engine = self.full()
        assert engine.core.stats().batch_is_full and engine.core.stats().num_running == 2

    def test_batch_is_full_flag_is_set_when_running_requests_reserve_the_whole_pool(self) -> None:
        engine = make(num_pages=16, schedule_conservativeness=9.0)
        for handle in range(2):
            engine.submit(handle, [handle] * 8, max_new_tokens=40)
        engine.turn()
        assert engine.core.stats().batch_is_full and engine.core.stats().num_running == 1

    def test_batch_is_full_flag_stays_unset_when_only_the_step_is_full(self) -> None:
        engine = make(chunked_prefill_size=16)
        for handle in range(3):
            engine.submit(handle, [handle] * 16, max_new_tokens=4)
        engine.turn()
        assert not engine.core.stats().batch_is_full and engine.core.stats().num_running == 1

    def test_batch_is_full_flag_stays_unset_when_no_other_request_runs(self) -> None:
        engine = make(num_pages=16)
        engine.submit(0, [1] * 40, max_new_tokens=80)
        engine.turn()
        assert engine.core.stats().num_running == 1 and not engine.core.stats().batch_is_full

    def test_batch_is_full_flag_prevents_admission_despite_free_pages(self) -> None:
        engine = make(num_pages=32, schedule_conservativeness=9.0)
        engine.submit(0, [1] * 8, max_new_tokens=40, ignore_eos=True)
        engine.submit(1, [2] * 90, max_new_tokens=20)
        engine.turn()
        engine.abort(1)
        engine.submit(2, [3] * 4, max_new_tokens=1)
        for _ in range(10):
            engine.turn()
        stats = engine.core.stats()
        assert stats.batch_is_full and stats.num_waiting == 1 and stats.pages_free > 10

    def test_batch_is_full_flag_is_cleared_when_a_request_finishes(self) -> None:
        engine = self.full()
        for _ in range(12):
            engine.turn()
        assert list(engine.finishes) == [0]
        assert 2 in {request.handle for request in engine.core.queues.extending + engine.core.queues.decoding}

    def test_batch_is_full_flag_is_cleared_when_a_running_request_is_aborted(self) -> None:
        engine = self.full()
        engine.abort(0)
        assert not engine.core.stats().batch_is_full

    def test_batch_is_full_flag_stays_set_when_a_waiting_request_is_aborted(self) -> None:
        engine = self.full()
        engine.submit(3, [9] * 4, max_new_tokens=4)
        engine.abort(3)
        assert engine.core.stats().batch_is_full

    def test_batch_is_full_flag_is_cleared_when_a_request_is_retracted(self) -> None:
        engine = self.full()
        engine.control.retune({"retract_interval": 1})
        engine.core.plan(engine.now)
        assert engine.core.stats().retractions_total == 1 and not engine.core.stats().batch_is_full

    def test_batch_is_full_flag_is_cleared_when_a_request_is_preempted(self) -> None:
        engine = self.full(enable_priority_scheduling=True)
        engine.submit(9, [9] * 4, priority=1, max_new_tokens=4)
        engine.turn()
        assert engine.core.stats().preemptions_total == 1
        assert 9 in {request.handle for request in engine.core.queues.extending + engine.core.queues.decoding}

    def test_batch_is_full_flag_is_cleared_when_the_worker_is_idle(self) -> None:
        engine = self.full()
        engine.drain()
        engine.turn()
        assert not engine.core.stats().batch_is_full
        assert all(plan.mode is not ForwardMode.IDLE for plan in engine.plans)
