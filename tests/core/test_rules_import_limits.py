"""Rules for the end of an import's wait, and for the pages that imports may take from running requests."""

from __future__ import annotations

from rootstock_llm.services.worker.core.contracts.messages import FinishReason, TraceKind
from rootstock_llm.services.worker.core.contracts.transfers import UNASKED, Fact, Tier
from rootstock_llm.services.worker.exec.fake import TimeModel
from tests.core.harness import Engine
from tests.core.test_rules_imports import begin, cold, quarantined, roomy
from tests.core.test_rules_tiers import MIB, ask, prompt, tiered, turns
from tests.core.test_scheduler_properties import check_run


def computing_takes(engine: Engine, token_s: float) -> None:
    tiers = engine.core.tiers
    assert tiers is not None
    tiers.rates._token_s = None  # forgets earlier measurements
    tiers.rates.computed(1000, 0, 1000 * token_s)


class TestLateImports:
    def late(self, page_moved_s: float = 5.0) -> Engine:
        """Returns an engine whose request 0 waits for nine pages. The core has measured the time of computing."""
        engine = roomy(page_moved_s=0.0)
        ask(engine, 1000, prompt(0))
        engine.control.flush_cache()
        computing_takes(engine, 1e-3)
        engine.executor._time = TimeModel(per_page_moved=page_moved_s)
        begin(engine, 0, prompt(0))
        engine.turn()
        assert quarantined(engine) == 9
        return engine

    def test_late_import_is_abandoned_and_missing_pages_are_computed(self) -> None:
        engine = self.late()
        while not engine.finishes.get(0):
            engine.turn()
        assert engine.now < 1.0 and not engine.core.settled and quarantined(engine) == 9
        engine.check_answer(0)
        stats = engine.core.stats()
        assert stats.given_up_operations_total == 1 and stats.recomputed_pages_total == 9
        engine.drain()
        assert engine.now > 45.0 and not quarantined(engine)
        check_run(engine)

    def test_import_is_not_late_while_an_earlier_import_runs(self) -> None:
        """Each import takes 0.27 s, and they run in sequence; computing takes 0.36 s."""
        engine = cold(roomy(num_pages=64), prompt(0), prompt(1))
        computing_takes(engine, 1e-2)
        engine.executor._time = TimeModel(per_page_moved=0.03)
        begin(engine, 0, prompt(0))
        begin(engine, 1, prompt(1))
        engine.drain()
        assert engine.core.stats().given_up_operations_total == 0
        assert engine.finishes[0].cached_tokens == engine.finishes[1].cached_tokens == 36

    def test_import_begins_although_the_running_step_fails(self) -> None:
        """The operation waits for the running step, and begins although this step fails and no further step is planned."""
        engine = roomy(page_moved_s=0.0)
        ask(engine, 1000, prompt(0))
        engine.control.flush_cache()
        computing_takes(engine, 1e-3)
        engine.executor._time = TimeModel(per_page_moved=5.0)
        begin(engine, 1, prompt(1, 16))
        engine.turn()
        begin(engine, 0, prompt(0))
        plan = engine.core.plan(engine.now)
        assert plan is not None and engine.prev is not None
        engine.executor.transfer(plan.operations)
        engine.core.fail(engine.prev.plan.step_id, "made to fail", engine.now)
        if plan.num_rows:
            engine.core.fail(plan.step_id, "made to fail", engine.now)
        engine.prev = None
        turns(engine, 30)
        assert engine.core.stats().given_up_operations_total == 1 and engine.finishes[0].completion_tokens == 4

    def test_pages_of_a_late_import_serve_the_next_request(self) -> None:
        engine = self.late()
        while not engine.core.stats().given_up_operations_total:
            engine.turn()
        engine.abort(0)
        engine.drain()
        assert ask(engine, 1, prompt(0)).cached_from == {Tier.DEVICE: 36}

    def test_request_does_not_wait_for_a_late_import(self) -> None:
        engine = self.late()
        while not engine.core.stats().given_up_operations_total:
            engine.turn()
        engine.abort(0)
        begin(engine, 1, prompt(0))
        turns(engine, 3)
        assert engine.core.stats().num_running == 1
        engine.drain()
        check_run(engine)

    def test_import_may_take_one_second_when_the_computing_time_is_unknown(self) -> None:
        other = tiered(has_storage=True)
        ask(other, 0, prompt(0))
        engine = roomy(page_moved_s=0.2, has_storage=True)
        engine.executor.storage = other.executor.storage
        engine.core.ended(Fact(UNASKED, stored=tuple(other.executor.storage)), engine.now)
        begin(engine, 0, prompt(0))
        turns(engine, 95)
        assert quarantined(engine) == 9 and engine.core.stats().num_importing == 1
        turns(engine, 15)
        assert engine.core.stats().num_importing == 0 and engine.core.stats().given_up_operations_total == 1
        engine.drain()
        check_run(engine)

    def test_import_is_tried_again_after_many_refusals(self) -> None:
        engine = roomy(page_bytes=20 * MIB, page_moved_s=1e-3)
        ask(engine, 0, prompt(0))
        computing_takes(engine, 5e-4)
        read_at = 0
        for handle in range(1, 40):
            engine.control.flush_cache()
            cached = ask(engine, handle, prompt(0)).cached_tokens
            if cached:
                read_at = handle
                break
            assert engine.core.stats().recomputed_pages_total == 9 * handle
        assert read_at > 2
        assert TraceKind.IMPORTING not in [event.kind for event in engine.control.trace("r1")]


class TestPoolLimits:
    def test_pins_of_imported_pages_are_released_instead_of_retracting_a_request(self) -> None:
        """The pool has 32 pages. Two requests grow to 16 pages each. Nine pages are imported for a request without a slot."""
        engine = cold(roomy(num_pages=32, max_running_requests=2), prompt(0))
        for handle in (1, 2):
            begin(engine, handle, prompt(handle, 16), 48)
        turns(engine, 3)
        begin(engine, 0, prompt(0))
        engine.drain()
        stats = engine.core.stats()
        assert stats.loaded_pages_total == 9 and stats.retractions_total == 0
        check_run(engine)

    def test_pins_of_imported_pages_are_released_instead_of_aborting_the_last_request(self) -> None:
        engine = cold(roomy(num_pages=20, max_running_requests=1), prompt(0))
        begin(engine, 1, prompt(1, 16), 48)
        engine.turn()
        begin(engine, 0, prompt(0))
        engine.drain()
        assert engine.core.stats().loaded_pages_total > 4
        assert engine.finishes[1].reason is FinishReason.LENGTH
        check_run(engine)

    def test_request_that_needs_the_whole_pool_runs_in_the_first_step(self) -> None:
        """The device has the first pages of the prompt. With them locked, no page is left for an import of the others."""
        engine = cold(roomy(num_pages=11), prompt(0))
        ask(engine, 1, prompt(0, 16))
        begin(engine, 0, prompt(0))
        engine.turn()
        stats = engine.core.stats()
        assert stats.num_importing == 0 and stats.num_running == 1 and stats.host_pages_used > 0
        engine.drain()
        assert engine.finishes[0].cached_from.keys() == {Tier.DEVICE}
        check_run(engine)

    def test_request_is_not_aborted_while_a_running_operation_may_free_pages(self) -> None:
        """The request grows to 16 of 20 pages. An operation for an aborted request still writes nine pages."""
        for prompt_tokens in (16, 60):
            engine = cold(roomy(num_pages=20, page_moved_s=0.3), prompt(0))
            begin(engine, 0, prompt(0))
            engine.turn()
            engine.abort(0)
            begin(engine, 1, prompt(1, prompt_tokens), 64 - prompt_tokens)
            turns(engine, 60)
            assert quarantined(engine) == 9 and not engine.finishes.get(1)
            engine.drain()
            assert engine.finishes[1].reason is FinishReason.LENGTH
            check_run(engine)

    def test_imports_write_at_most_half_of_the_pool(self) -> None:
        engine = cold(roomy(num_pages=32, host_pages=128), prompt(0, 56), prompt(1, 56))
        for number in range(2):
            begin(engine, number, prompt(number, 56))
        most = 0
        while len(engine.core.queues.by_key):
            engine.turn()
            most = max(most, quarantined(engine))
        assert most == 16
        check_run(engine)

    def test_import_leaves_enough_pages_to_compute_the_request(self) -> None:
        """If the read hangs, the request needs 11 of the 16 pages. So the import may take five."""
        engine = cold(roomy(num_pages=16), prompt(0))
        begin(engine, 0, prompt(0))
        engine.turn()
        assert quarantined(engine) == 5
        engine.drain()
        assert engine.finishes[0].cached_tokens == 36

    def test_request_is_correct_when_pins_are_released_during_an_import(self) -> None:
        """A running request takes the pages that have arrived, while further pages are being read."""
        engine = cold(roomy(page_bytes=8 * MIB, page_moved_s=0.02, num_pages=24), prompt(0))
        begin(engine, 1, prompt(1, 16), 48)
        engine.turn()
        begin(engine, 0, prompt(0))
        engine.drain()
        check_run(engine)
        assert engine.core.stats().retractions_total == 0
