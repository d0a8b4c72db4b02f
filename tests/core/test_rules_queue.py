"""Rules for timeouts and for the limit of the waiting queue."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make


def ends_at(engine: Engine, handle: int) -> float:
    """Runs turns of 0.01 s until the request ends. Returns the time on the engine's clock."""
    for _ in range(300):
        if handle in engine.finishes:
            return engine.now
        engine.turn()
    raise AssertionError("the request did not end")


class TestTimeouts:
    def test_waiting_timeout_counts_from_arrival(self) -> None:
        engine = make(max_running_requests=1, waiting_timeout_s=0.2)
        engine.submit(0, [1] * 8, max_new_tokens=100, ignore_eos=True)
        for _ in range(10):
            engine.turn()
        engine.submit(1, [2] * 8, max_new_tokens=5)
        assert ends_at(engine, 1) == pytest.approx(0.3, abs=0.015)
        assert engine.finishes[1].error is ErrorCode.TIMEOUT and "queue" in engine.finishes[1].message

    def test_running_timeout_counts_from_the_first_admission(self) -> None:
        engine = make(max_running_requests=1, running_timeout_s=0.3)
        engine.submit(0, [1] * 8, max_new_tokens=20, ignore_eos=True)
        engine.submit(1, [2] * 8, max_new_tokens=100, ignore_eos=True)
        engine.drain()
        assert engine.finishes[0].reason is FinishReason.LENGTH
        assert engine.finishes[1].error is ErrorCode.TIMEOUT
        assert engine.finishes[1].queue_s > 0.15, "the wait before admission does not count as running time"
        assert 25 <= engine.finishes[1].completion_tokens <= 31

    def test_timeouts_are_not_reset_when_a_request_is_retracted(self) -> None:
        engine = make(running_timeout_s=0.3, waiting_timeout_s=0.1, retract_interval=2)
        engine.submit(0, [1] * 8, max_new_tokens=100, ignore_eos=True)
        assert ends_at(engine, 0) == pytest.approx(0.31, abs=0.025)
        assert engine.finishes[0].retractions > 5

    def test_request_timeout_counts_from_arrival_to_the_last_token(self) -> None:
        engine = make(max_running_requests=1)
        engine.submit(0, [1] * 8, max_new_tokens=10, ignore_eos=True)
        engine.submit(1, [2] * 8, max_new_tokens=100, ignore_eos=True, timeout_s=0.3)
        assert ends_at(engine, 1) == pytest.approx(0.3, abs=0.015)
        assert 0 < engine.finishes[1].completion_tokens < 25
        engine.check_answer(1)

    def test_timeout_frees_the_pages_of_a_request(self) -> None:
        engine = make(running_timeout_s=0.1)
        engine.submit(0, [1] * 8, max_new_tokens=100, ignore_eos=True)
        ends_at(engine, 0)
        assert engine.core.stats().pages_leased == 0


class TestBoundedQueue:
    @staticmethod
    def full(**changes: Any) -> Engine:
        """Returns an engine with the running request 0 and the waiting requests 1 and 2, which fill the queue."""
        engine = make(max_running_requests=1, max_queued_requests=2, **changes)
        engine.submit(0, [1] * 8, max_new_tokens=40, ignore_eos=True)
        engine.turn()
        for handle in (1, 2):
            engine.submit(handle, [handle] * 8, max_new_tokens=4, ignore_eos=True)
        return engine

    def test_full_queue_refuses_a_request(self) -> None:
        engine = self.full()
        assert engine.core.stats().num_waiting == 2
        engine.submit(3, [3] * 8, max_new_tokens=4)
        engine.turn()
        assert list(engine.finishes) == [3] and engine.finishes[3].error is ErrorCode.QUEUE_FULL
        engine.drain()
        assert all(engine.finishes[handle].reason is FinishReason.LENGTH for handle in range(3))

    def test_full_queue_accepts_a_request_when_another_leaves(self) -> None:
        engine = self.full()
        engine.abort(1)
        engine.submit(3, [3] * 8, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert engine.finishes[3].reason is FinishReason.LENGTH

    def test_requests_that_wait_for_a_grammar_count_for_the_queue_limit(self) -> None:
        engine = make(max_queued_requests=1)
        engine.submit(0, [1] * 8, max_new_tokens=4, grammar=spec(1, 4))
        engine.submit(1, [2] * 8, max_new_tokens=4)
        engine.drain()
        assert engine.finishes[1].error is ErrorCode.QUEUE_FULL
        engine.check_answer(0)

    def test_full_queue_replaces_a_request_that_waits_for_a_grammar_by_a_more_urgent_one(self) -> None:
        """A gated request counts as waiting. Waiting requests that are more urgent than the gated request stay."""
        engine = make(
            max_running_requests=1, max_queued_requests=2, enable_priority_scheduling=True, priority_preemption_threshold=9
        )
        engine.submit(0, [1] * 8, max_new_tokens=40, ignore_eos=True)
        engine.turn()
        engine.submit(1, [2] * 8, priority=0, max_new_tokens=4, grammar=spec(0, 9))
        engine.submit(2, [3] * 8, priority=5, max_new_tokens=4, ignore_eos=True)
        engine.submit(3, [4] * 8, priority=6, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert engine.finishes[1].error is ErrorCode.QUEUE_FULL
        assert {engine.finishes[handle].reason for handle in (0, 2, 3)} == {FinishReason.LENGTH}

    @pytest.mark.parametrize(("urgency", "refused", "low_first"), [(1, 2, False), (1, 2, True), (0, 3, True), (-1, 3, False)])
    def test_full_queue_replaces_the_last_request_by_a_more_urgent_one(self, urgency: int, refused: int, low_first: bool) -> None:
        engine = self.full(
            enable_priority_scheduling=True, schedule_low_priority_values_first=low_first, priority_preemption_threshold=9
        )
        engine.submit(3, [3] * 8, priority=-urgency if low_first else urgency, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert [h for h, finish in engine.finishes.items() if finish.error is ErrorCode.QUEUE_FULL] == [refused]

    def test_full_queue_replaces_no_request_when_priorities_are_off(self) -> None:
        engine = self.full()
        engine.submit(3, [3] * 8, priority=100, max_new_tokens=4)
        engine.drain()
        assert engine.finishes[3].error is ErrorCode.QUEUE_FULL

    def test_full_queue_replaces_the_least_urgent_request_even_if_that_request_is_the_oldest(self) -> None:
        engine = make(
            max_running_requests=1, max_queued_requests=2, enable_priority_scheduling=True, priority_preemption_threshold=9
        )
        for handle, priority in enumerate((9, 0, 1, 2)):
            engine.submit(handle, [handle] * 8, priority=priority, max_new_tokens=4, ignore_eos=True)
            engine.turn()
        engine.drain()
        assert [h for h, finish in engine.finishes.items() if finish.error is ErrorCode.QUEUE_FULL] == [1]
