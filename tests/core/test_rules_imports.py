"""Rules for imports: which requests wait for pages of another tier, and what happens to the pages if the request ends."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, PauseMode, SessionTurn, TraceKind
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, ForwardMode
from rootstock_llm.services.worker.core.contracts.transfers import OperationKind, Tier
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.test_rules_tiers import ask, keys_of, moved, num_moved, num_running, prompt, slow, tiered, turns
from tests.core.test_scheduler_properties import check_run

LOAD, FETCH = OperationKind.LOAD, OperationKind.FETCH


def cold(engine: Engine, *prompts: list[int]) -> Engine:
    """Runs each prompt and then flushes the device's cache, so that only the lower tiers have the pages of the prompts."""
    for number, ids in enumerate(prompts):
        ask(engine, 1000 + number, ids)
        engine.control.flush_cache()
    return slow(engine)


def roomy(page_moved_s: float = 0.003, **changes: Any) -> Engine:
    return tiered(page_moved_s=page_moved_s, **{"num_pages": 64, **changes})


def begin(engine: Engine, handle: int, ids: list[int], max_new_tokens: int = 4, **params: Any) -> None:
    engine.submit(handle, ids, max_new_tokens=max_new_tokens, ignore_eos=True, **params)


def importing(**changes: Any) -> Engine:
    """Returns an engine whose request 0 waits for nine pages."""
    engine = cold(roomy(**changes), prompt(0))
    begin(engine, 0, prompt(0))
    engine.turn()
    assert len(engine.core.memory.quarantined) == num_moved(engine, LOAD) == 9
    return engine


def resume(engine: Engine) -> None:
    engine.control.resume()
    engine.idle_turns = 0  # the pause has counted idle turns


def cached_pages(engine: Engine) -> int:
    return engine.core.memory.tree.num_pages


def quarantined(engine: Engine) -> int:
    return len(engine.core.memory.quarantined)


class TestSharing:
    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("kind", [LOAD, FETCH])
    def test_requests_with_one_prompt_import_each_page_once(self, kind: OperationKind) -> None:
        engine = cold(roomy(has_storage=kind is FETCH), prompt(0))
        if kind is FETCH:
            engine.control.flush_tiers((Tier.HOST,))
        for handle in range(4):
            begin(engine, handle, prompt(0))
        engine.drain()
        assert num_moved(engine, kind) == 9
        assert [engine.finishes[handle].cached_tokens for handle in range(4)] == [36] * 4
        check_run(engine)

    def test_import_reads_only_pages_that_the_tree_lacks(self) -> None:
        engine = cold(roomy(), prompt(0))
        ask(engine, 0, prompt(0, 20))
        before = num_moved(engine, LOAD)
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 20, Tier.HOST: 16}
        assert num_moved(engine, LOAD) - before == 4

    def test_shared_prefix_is_imported_once(self) -> None:
        tails = [prompt(1, 20) + prompt(number, 20) for number in (2, 3)]
        engine = cold(roomy(), *tails)
        before = num_moved(engine, LOAD)
        for handle, ids in enumerate(tails):
            begin(engine, handle, ids)
        engine.drain()
        assert num_moved(engine, LOAD) - before == 5 + 4 + 4
        assert [engine.finishes[handle].cached_tokens for handle in range(2)] == [36, 36]
        check_run(engine)

    def test_request_counts_only_imported_pages_that_match_the_prompt(self) -> None:
        """The two prompts share six pages, five of which are on the device.

        One import brings the sixth shared page and three pages that only the first prompt has.
        """
        engine = cold(roomy(), prompt(1, 24) + prompt(2, 16))
        ask(engine, 8, prompt(1, 20))
        begin(engine, 0, prompt(1, 24) + prompt(2, 16))
        begin(engine, 1, prompt(1, 24) + prompt(3, 16))
        engine.drain()
        assert engine.finishes[0].cached_from == {Tier.DEVICE: 20, Tier.HOST: 16}
        assert engine.finishes[1].cached_from == {Tier.DEVICE: 20, Tier.HOST: 4}

    def test_import_continues_when_one_of_two_requests_is_aborted(self) -> None:
        engine = importing()
        begin(engine, 1, prompt(0))
        engine.turn()
        engine.abort(0)
        engine.drain()
        assert num_moved(engine, LOAD) == 9 and engine.finishes[1].cached_tokens == 36
        check_run(engine)


class TestAbortedRequests:
    def test_pages_of_an_aborted_request_stay_quarantined_until_the_import_ends(self) -> None:
        for pages in (9, 4, 0):  # pages that are moved
            engine = importing()
            engine.executor.pages_moved = lambda operation, pages=pages: pages
            engine.abort(0)
            assert quarantined(engine) == 9 and not engine.core.settled
            while num_running(engine):
                assert quarantined(engine) == 9
                engine.turn()
            memory = engine.core.memory
            assert not memory.quarantined and engine.core.settled
            assert (memory.tree.num_evictable, memory.pages.num_free) == (pages, 64 - pages)
            check_run(engine)

    def test_pages_of_an_aborted_request_serve_the_next_request(self) -> None:
        engine = importing()
        engine.abort(0)
        engine.drain()
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 36}
        assert num_moved(engine, LOAD) == 9

    def test_importing_request_times_out(self) -> None:
        engine = cold(roomy(page_moved_s=0.02), prompt(0))
        begin(engine, 0, prompt(0), timeout_s=0.05)
        turns(engine, 8)
        assert engine.finishes[0].error is ErrorCode.TIMEOUT and quarantined(engine) == 9
        engine.drain()
        assert cached_pages(engine) == 9 and not quarantined(engine)
        check_run(engine)

    def test_imported_pages_are_pinned_until_the_request_is_admitted_or_ends(self) -> None:
        engine = cold(roomy(max_running_requests=1), prompt(0))
        begin(engine, 1, [9], 30)
        engine.turn()
        begin(engine, 0, prompt(0))
        turns(engine, 8)
        assert engine.core.stats().num_importing == 0 and engine.core.settled
        assert engine.core.memory.tree.num_evictable == 0
        engine.abort(0)
        assert engine.core.memory.tree.num_evictable == 9
        engine.drain()
        check_run(engine)

    def test_flush_discards_the_pages_of_a_running_import(self) -> None:
        engine = importing()
        engine.control.flush_cache()
        engine.drain()
        assert engine.finishes[0].cached_tokens == 0
        assert num_moved(engine, LOAD) == 9 and engine.core.stats().loaded_pages_total == 0
        check_run(engine)

    def test_importing_request_keeps_the_queue_position(self) -> None:
        engine = cold(roomy(max_running_requests=1), prompt(0))
        begin(engine, 2, [9], 12)
        engine.turn()
        begin(engine, 0, prompt(0))
        engine.turn()
        begin(engine, 1, [8])
        engine.drain()
        assert list(engine.finishes)[-2:] == [0, 1]

    def test_importing_request_returns_to_the_head_of_the_queue(self) -> None:
        """The device has the prefix when the request arrives, and loses it while the request waits.

        The request must import the prefix, and begin before later requests.
        """
        engine = slow(roomy(max_running_requests=1))
        begin(engine, 9, prompt(0), 12)
        turns(engine, 4)
        begin(engine, 0, prompt(0))
        for handle in (1, 2, 3):
            begin(engine, handle, [handle], 8)
        engine.control.pause(PauseMode.IN_PLACE, engine.now)
        engine.abort(9)
        turns(engine, 8)
        engine.control.flush_cache()
        resume(engine)
        engine.drain()
        assert num_moved(engine, LOAD) == 9
        assert list(engine.finishes).index(0) < list(engine.finishes).index(2)

    def test_trace_has_the_numbers_of_requested_and_imported_tokens(self) -> None:
        engine = importing()
        engine.drain()
        told = [(event.kind, event.detail) for event in engine.control.trace("r0")]
        assert (TraceKind.IMPORTING, 36) in told and (TraceKind.IMPORTED, 36) in told and (TraceKind.ADMITTED, 36) in told


class TestFailedImports:
    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("kind", [LOAD, FETCH])
    def test_import_that_moves_no_page_only_delays_the_request(self, kind: OperationKind) -> None:
        engine = cold(roomy(has_storage=kind is FETCH), prompt(0))
        if kind is FETCH:
            engine.control.flush_tiers((Tier.HOST,))
        engine.executor.pages_moved = lambda operation: 0
        finish = ask(engine, 0, prompt(0))
        stats = engine.core.stats()
        assert finish.cached_tokens == 0 and not any(finish.cached_from.values())
        assert stats.loaded_pages_total == stats.fetched_pages_total == 0
        assert stats.failed_operations_total > 0 and stats.recomputed_pages_total == 9
        check_run(engine)

    def test_partial_import_counts_the_moved_pages(self) -> None:
        engine = importing()
        engine.executor.pages_moved = lambda operation: 4 if len(moved(engine, LOAD)) == 1 else 0
        engine.drain()
        stats = engine.core.stats()
        assert engine.finishes[0].cached_from == {Tier.DEVICE: 0, Tier.HOST: 16}
        assert stats.loaded_pages_total == 4 and stats.failed_operations_total > 0 and stats.recomputed_pages_total == 5
        check_run(engine)

    def test_failed_import_is_repeated_at_most_once(self) -> None:
        engine = importing()
        engine.executor.pages_moved = lambda operation: 0
        engine.drain()
        assert len(moved(engine, LOAD)) <= 2


class TestIdleTurns:
    def test_paused_scheduler_plans_an_idle_step_for_page_operations(self) -> None:
        engine = cold(roomy(), prompt(0))
        engine.control.pause(PauseMode.IN_PLACE, engine.now)
        begin(engine, 0, prompt(0))
        first = len(engine.plans)
        turns(engine, 6)
        (plan,) = engine.plans[first:]
        assert plan.mode is ForwardMode.IDLE and plan.num_rows == 0 and len(plan.operations) == 1
        assert cached_pages(engine) == 9 and engine.core.settled and not engine.finishes.get(0)
        resume(engine)
        engine.drain()
        assert engine.finishes[0].cached_tokens == 36
        check_run(engine)

    def test_plan_is_idle_if_and_only_if_the_plan_has_no_rows(self) -> None:
        engine = cold(tiered(has_storage=True), prompt(0), prompt(1))
        assert {plan.num_rows == 0 for plan in engine.plans if plan.mode is ForwardMode.IDLE} == {True}
        assert all(plan.num_rows for plan in engine.plans if plan.mode is not ForwardMode.IDLE)
        assert all(plan.operations for plan in engine.plans if plan.mode is ForwardMode.IDLE)


class TestImportingRequests:
    @pytest.mark.parametrize(
        ("params", "pages"),
        [
            ({}, 9),
            ({"prompt_logprobs_from": 0}, 0),
            ({"prompt_logprobs_from": 21}, 5),
            ({"prompt_logprobs_from": 39}, 9),
        ],
    )
    def test_import_is_limited_to_the_largest_usable_prefix(self, params: dict[str, Any], pages: int) -> None:
        engine = cold(roomy(), prompt(0))
        assert ask(engine, 0, prompt(0), **params).cached_tokens == 4 * pages
        assert num_moved(engine, LOAD) == pages

    def test_embedding_imports_pages_when_the_pooling_allows_reuse(self) -> None:
        for reuses, pages in ((True, 9), (False, 0)):
            engine = cold(roomy(pooling_reuses_prefix=reuses), prompt(0))
            engine.submit(0, prompt(0), max_new_tokens=1, embedding=EmbeddingParams())
            engine.drain()
            engine.check_answer(0)
            assert num_moved(engine, LOAD) == pages and engine.finishes[0].cached_tokens == 4 * pages

    def test_request_with_a_grammar_imports_kv_after_the_compilation(self) -> None:
        engine = cold(roomy(), prompt(0))
        engine.submit(0, prompt(0), max_new_tokens=8, grammar=spec(1, 6))
        turns(engine, 3)
        assert num_moved(engine, LOAD) == 0 and engine.core.stats().num_importing == 0
        engine.compile()
        assert engine.core.stats().num_importing == 1
        engine.drain()
        assert engine.finishes[0].cached_tokens == 36
        check_run(engine)

    @pytest.mark.parametrize("more", [{}, {"grammar": spec(1, 17), "top_logprobs": 0}])
    def test_resumed_request_imports_the_pages_of_the_earlier_output(self, more: dict[str, Any]) -> None:
        engine = roomy()
        params = {"max_new_tokens": 14, "ignore_eos": True, **more}
        engine.submit(0, prompt(0), **params)
        engine.drain()
        engine.control.flush_cache()
        slow(engine)
        engine.submit(1, prompt(0), output=engine.outputs[0][:9], **params)
        engine.drain()
        assert num_moved(engine, LOAD) == 12  # all of 49 tokens except the last
        assert engine.finishes[1].cached_from == {Tier.DEVICE: 0, Tier.HOST: 40}
        check_run(engine)

    def test_retracted_request_imports_again(self) -> None:
        engine = slow(roomy())
        begin(engine, 0, prompt(0), 12)
        turns(engine, 8)
        engine.control.pause(PauseMode.RETRACT, engine.now)
        turns(engine, 8)
        engine.control.flush_cache()
        assert num_moved(engine, LOAD) == 0
        resume(engine)
        engine.drain()
        assert num_moved(engine, LOAD) >= 10 and engine.finishes[0].cached_tokens == 0
        check_run(engine)

    def test_retracted_request_that_imports_pages_runs_before_new_requests(self) -> None:
        """The request arrived last, but ran first because its output is the longest."""
        engine = slow(roomy(max_running_requests=1, schedule_policy=SchedulePolicy.LOF))
        begin(engine, 1, [8])
        begin(engine, 2, [9])
        begin(engine, 0, prompt(0), 12)
        turns(engine, 8)
        engine.control.retune({"schedule_policy": "fcfs"})
        engine.control.pause(PauseMode.RETRACT, engine.now)
        turns(engine, 8)
        engine.control.flush_cache()
        resume(engine)
        engine.drain()
        assert num_moved(engine, LOAD) >= 10 and list(engine.finishes)[-3:] == [1, 0, 2]

    def test_request_searches_tiers_again_before_admission(self) -> None:
        """The device has the prefix when the request arrives, and loses it while the request waits."""
        engine = slow(roomy(max_running_requests=1))
        begin(engine, 1, prompt(0), 12)
        turns(engine, 4)
        begin(engine, 0, prompt(0))
        engine.control.pause(PauseMode.IN_PLACE, engine.now)
        engine.abort(1)
        turns(engine, 8)
        engine.control.flush_cache()
        resume(engine)
        engine.drain()
        assert engine.finishes[0].cached_from == {Tier.DEVICE: 0, Tier.HOST: 36}
        check_run(engine)

    def test_session_turn_imports_the_pages_of_the_previous_turn(self) -> None:
        engine = slow(roomy())
        engine.open_session("s")
        ask(engine, 0, prompt(0, 30), session=SessionTurn("s"))
        engine.control.flush_cache()
        finish = ask(engine, 1, prompt(1, 6), session=SessionTurn("s"))
        assert finish.cached_from == {Tier.DEVICE: 0, Tier.HOST: 32}
        check_run(engine)

    def test_importing_request_has_no_row_and_no_lease(self) -> None:
        engine = importing()
        stats = engine.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_leased, stats.pages_quarantined) == (0, 1, 0, 9)
        assert all(key in engine.plans[-1].operations[0].keys for key in keys_of(prompt(0))[:9])
