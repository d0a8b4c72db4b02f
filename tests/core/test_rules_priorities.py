"""Rules for the order of service by priority and for preemption (docs/design/scheduler.md#preemption)."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.messages import FinishReason
from tests.all_pairs import each_value
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make


def prioritised(**changes: Any) -> Engine:
    return make(enable_priority_scheduling=True, **changes)


def running(engine: Engine) -> list[int]:
    queues = engine.core.queues
    return sorted(request.handle for request in queues.extending + queues.decoding)


def start(engine: Engine, priorities: list[int], max_new: int = 40) -> None:
    """Submits one request per priority, with its index as the handle, and runs turns until all of them decode."""
    for handle, priority in enumerate(priorities):
        engine.submit(handle, [handle + 1] * 8, priority=priority, max_new_tokens=max_new, ignore_eos=True)
        engine.turn()
    for _ in range(6):
        engine.turn()
    assert running(engine) == list(range(len(priorities)))


class TestOrder:
    @pytest.mark.parametrize(
        ("changes", "order"),
        [
            ({"enable_priority_scheduling": True}, [1, 0, 3, 2]),
            ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, [2, 0, 3, 1]),
            ({}, [0, 1, 2, 3]),
        ],
        ids=["higher value first", "lower value first", "off: by arrival"],
    )
    def test_priority_order_follows_the_setting(self, changes: dict[str, Any], order: list[int]) -> None:
        engine = make(max_running_requests=1, **changes)
        for handle, priority in enumerate((0, 5, -5, 0)):
            engine.submit(handle, [handle + 1] * 4, priority=priority, max_new_tokens=1)
        engine.drain()
        assert [int(plan.input_ids[0]) - 1 for plan in engine.plans] == order


class TestThreshold:
    @pytest.mark.parametrize(
        ("threshold", "difference", "displaced", "low_first"),
        [(0, 0, 0, False), (0, 1, 1, True), (5, 5, 0, True), (5, 5, 0, False), (5, 6, 1, False)],
    )
    def test_preemption_needs_a_priority_difference_above_the_threshold(
        self, threshold: int, difference: int, displaced: int, low_first: bool
    ) -> None:
        engine = prioritised(
            max_running_requests=1, priority_preemption_threshold=threshold, schedule_low_priority_values_first=low_first
        )
        start(engine, [0])
        engine.submit(9, [99] * 8, priority=-difference if low_first else difference, max_new_tokens=4)
        engine.turn()
        assert engine.core.stats().preemptions_total == displaced
        assert running(engine) == ([9] if displaced else [0])
        engine.drain()
        assert engine.finishes[0].retractions == displaced

    def test_preemption_is_off_without_priority_scheduling(self) -> None:
        engine = make(max_running_requests=1)
        start(engine, [0])
        engine.submit(9, [99] * 8, priority=100, max_new_tokens=4)
        engine.drain()
        assert engine.core.stats().preemptions_total == 0


class TestVictims:
    @pytest.mark.parametrize(
        ("priorities", "left"),
        [
            ([0, 0, 0], [[0, 1], [0], []]),
            ([1, 0, 2], [[0, 2], [2], []]),
            ([1, 0, 0], [[0, 1], [0], []]),
            ([0, 9, 0], [[0, 1], [1], [1]]),
        ],
        ids=["latest first", "least urgent first", "latest of equals", "more urgent requests stay"],
    )
    def test_preemption_takes_the_least_urgent_and_latest_request_first(
        self, priorities: list[int], left: list[list[int]]
    ) -> None:
        engine = prioritised(max_running_requests=3)
        start(engine, priorities)
        seen = []
        for handle in (10, 11, 12):
            engine.submit(handle, [handle] * 8, priority=5, max_new_tokens=60, ignore_eos=True)
            engine.turn()
            seen.append([h for h in running(engine) if h < 10])
        assert seen == left

    @pytest.mark.parametrize(("num_pages", "displaced"), [(13, 2), (15, 1), (20, 0)])
    def test_preemption_stops_when_the_request_fits(self, num_pages: int, displaced: int) -> None:
        engine = prioritised(num_pages=num_pages, schedule_conservativeness=0.1)
        for handle in range(3):
            engine.submit(handle, [handle + 1] * 8, max_new_tokens=12)
            engine.turn()
        for _ in range(4):
            engine.turn()
        engine.submit(9, [99] * 20, priority=5, max_new_tokens=8)
        engine.turn()
        assert engine.core.stats().preemptions_total == displaced
        assert running(engine) == [*range(3 - displaced), 9]

    def test_preemption_displaces_no_request_when_all_victims_together_free_too_little_memory(self) -> None:
        """In the first case, the output that is reserved for other requests leaves too little memory.

        In the second case, the victims share pages, which become free only once.
        """
        engine = prioritised(num_pages=32, context_len=256)
        engine.submit(0, [1] * 4, priority=5, max_new_tokens=100, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        engine.submit(1, [2] * 4, max_new_tokens=20)
        for _ in range(3):
            engine.turn()
        engine.submit(2, [3] * 40, priority=5, max_new_tokens=20)
        engine.turn()
        assert running(engine) == [0, 1] and not engine.core.stats().preemptions_total
        several = {"max_running_requests": 8, "chunked_prefill_size": 64, "schedule_conservativeness": 0.1}
        engine = prioritised(num_pages=40, context_len=256, **several)
        engine.submit(0, [1] * 60, priority=5, max_new_tokens=60, ignore_eos=True)
        for _ in range(4):
            engine.turn()
        for handle in (1, 2, 3):
            engine.submit(handle, [2] * 40 + [10 + handle] * 2, max_new_tokens=12)
            for _ in range(2):
                engine.turn()
        engine.submit(9, [3] * 80, priority=5, max_new_tokens=20)
        engine.turn()
        assert running(engine) == [0, 1, 2, 3] and not engine.core.stats().preemptions_total

    def test_urgent_request_starts_equally_early_with_preemption_and_with_free_slots(self) -> None:
        """A chunked prompt gives way to a more urgent request, with or without preemption."""
        turns = []
        for slots in (1, 2, 4):
            engine = prioritised(
                num_pages=600, context_len=2200, max_running_requests=slots, chunked_prefill_size=16, max_prefill_tokens=64
            )
            engine.submit(0, list(range(1000)), max_new_tokens=2)
            for _ in range(3):
                engine.turn()
            engine.submit(1, [7] * 12, priority=9, max_new_tokens=2)
            turns.append(0)
            while 1 not in engine.outputs:
                engine.turn()
                turns[-1] += 1
            engine.drain()
        assert turns == [2, 2, 2]

    def test_urgent_request_is_admitted_once_when_the_prefix_gate_releases_the_request(self) -> None:
        """The request waits for a prefix of a less urgent request, whose prompt is computed in chunks.

        Two rules admit the waiting request before the next chunk: its urgency, and the end of its wait.
        """
        for tenant in (b"a", b"b"):
            engine = prioritised(num_pages=600, context_len=2200, chunked_prefill_size=16, max_prefill_tokens=64)
            prefix = list(range(100, 164))
            engine.submit(0, prefix + list(range(1000)), max_new_tokens=2, payer=(b"a", 0, 1.0))
            for _ in range(2):
                engine.turn()
            engine.submit(1, prefix + [7] * 12, priority=9, max_new_tokens=2, payer=(tenant, 0, 1.0))
            for _ in range(12):
                engine.turn()
            assert 1 in engine.finishes
            engine.drain()

    @pytest.mark.parametrize("num_pages", [18, 22])
    def test_preemption_does_not_count_the_cached_prefix_of_the_urgent_request_as_free(self, num_pages: int) -> None:
        engine = prioritised(num_pages=num_pages, schedule_conservativeness=0.1)
        engine.submit(5, [99] * 40, max_new_tokens=1)
        engine.drain()
        for handle in range(2):
            engine.submit(handle, [handle + 1] * 8, max_new_tokens=30)
            engine.turn()
        for _ in range(4):
            engine.turn()
        engine.submit(9, [99] * 40 + [98] * 4, priority=5, max_new_tokens=16)
        engine.turn()
        assert 9 in running(engine)

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_preemption_frees_the_memory_that_admission_needs(self, ignore_eos: bool) -> None:
        engine = prioritised(num_pages=24, schedule_conservativeness=0.1, max_extend_steps=0)
        start(engine, [0, 0, 0], max_new=20)
        engine.submit(9, [99] * 20, priority=5, max_new_tokens=8, ignore_eos=ignore_eos)
        engine.turn()
        assert 9 in running(engine)

    def test_preemption_displaces_no_request_when_all_victims_are_too_small(self) -> None:
        engine = prioritised(num_pages=32, max_running_requests=8, schedule_conservativeness=0.1)
        engine.submit(0, [1] * 60, priority=9, max_new_tokens=40, ignore_eos=True)
        engine.submit(1, [2] * 8, priority=0, max_new_tokens=20, ignore_eos=True)
        for _ in range(8):
            engine.turn()
        engine.submit(2, [3] * 80, priority=5, max_new_tokens=40)
        engine.turn()
        assert engine.core.stats().preemptions_total == 0
        assert running(engine) == [0, 1]

    def test_preemption_displaces_a_request_whose_prompt_is_being_computed(self) -> None:
        engine = prioritised(max_running_requests=1)
        engine.submit(0, range(100), priority=0, max_new_tokens=4)
        engine.turn()
        engine.turn()
        engine.submit(1, [7] * 8, priority=1, max_new_tokens=4)
        engine.drain()
        assert engine.finishes[0].retractions == 1
        engine.check_answer(0)
        engine.check_answer(1)


class TestPreemptedRequest:
    @pytest.mark.by_day(one_in=2)
    @each_value(overlap=[True, False], page_size=[1, 4])
    def test_preempted_request_keeps_output_and_cached_prefix(self, overlap: bool, page_size: int) -> None:
        engine = make(overlap, enable_priority_scheduling=True, max_running_requests=1, page_size=page_size, num_pages=256)
        start(engine, [0])
        before = list(engine.core.queues.by_key[0, 0].progress.output_ids)
        engine.submit(1, [99] * 8, priority=1, max_new_tokens=4, ignore_eos=True)
        engine.turn()
        kept = list(engine.core.queues.by_key[0, 0].progress.output_ids)
        assert kept[: len(before)] == before and before
        num_plans = len(engine.plans)
        engine.drain()
        back = next(plan for plan in engine.plans[num_plans:] if plan.admitted)
        computed = (8 + len(kept) - 1 - overlap) // page_size * page_size
        assert int(back.starts[0]) == computed, "the request continues after its computed tokens, which are cached"
        assert len(back.input_ids) <= page_size + 1 + overlap

    @pytest.mark.by_day(one_in=2, seed=1)
    @each_value(overlap=[True, False], mixed=[True, False])
    def test_preempted_requests_get_the_models_tokens(self, overlap: bool, mixed: bool) -> None:
        engine = make(overlap, enable_priority_scheduling=True, max_running_requests=2, enable_mixed_chunk=mixed)
        start(engine, [0, 0], max_new=60)
        for handle in range(10, 16):
            engine.submit(handle, [handle] * 9, priority=handle, max_new_tokens=12, ignore_eos=True)
            for _ in range(4):
                engine.turn()
        engine.drain()
        assert engine.core.stats().preemptions_total >= 4
        for handle in engine.submitted:
            assert engine.finishes[handle].reason is FinishReason.LENGTH
            engine.check_answer(handle)

    def test_preemption_is_not_counted_as_retraction(self) -> None:
        engine = prioritised(max_running_requests=1)
        start(engine, [0])
        ratio = engine.core.stats().new_token_ratio
        engine.submit(1, [99] * 8, priority=1, max_new_tokens=1)
        engine.turn()
        stats = engine.core.stats()
        assert (stats.preemptions_total, stats.retractions_total, stats.num_retracted) == (1, 0, 1)
        assert stats.new_token_ratio <= ratio
