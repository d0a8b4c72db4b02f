"""Rules for prefill and decode workers: KV reservations, their lifetime, and reads from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, PauseMode, SessionTurn
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource, Prover, ReservationReleased, proof
from rootstock_llm.services.worker.core.contracts.transfers import Fact, OperationKind, PageOperation, Tier
from rootstock_llm.services.worker.exec.fake import hashed_token
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.peers import ADDRESS, EPOCH, Pair, computed_tokens, worker
from tests.night import NIGHTLY

PROMPT = list(range(40))  # ten pages of four tokens
FIRST_TOKEN = hashed_token(np.array(PROMPT, dtype=np.int32), 1000)


def pulls(engine: Engine) -> list[PageOperation]:
    return [operation for plan in engine.plans for operation in plan.operations if operation.kind is OperationKind.PULL]


class TestHandover:
    def test_prefill_worker_ignores_the_output_length_of_a_handed_over_request(self) -> None:
        """The number of loop iterations does not depend on `max_new_tokens`, and no row decodes on the prefill worker."""
        turns = {}
        for max_new in (2, 200):
            engine = worker(page_size=4, context_len=250, chunked_prefill_size=96, max_prefill_tokens=96)
            for handle in range(12):
                reservation = KvReservation(handle + 1, EPOCH, handle.to_bytes(16, "little"))
                engine.submit(handle, [handle + 1] * 24, hand_over=reservation, max_new_tokens=max_new)
            turns[max_new] = 0
            while not engine.core.idle or engine.prev is not None:
                engine.turn()
                turns[max_new] += 1
            assert {finish.reason for finish in engine.finishes.values()} == {FinishReason.HANDED_OVER}
            assert all(plan.num_rows == plan.num_extend for plan in engine.plans)
        assert turns[2] == turns[200]

    def test_prefill_worker_allocates_no_page_after_the_prompt(self) -> None:
        """If request 9 needed a page for its output, it would be retracted, because it has the fewest output tokens."""
        engine = worker(num_pages=13, context_len=120, chunked_prefill_size=96, schedule_conservativeness=0.1, max_extend_steps=0)
        for handle in range(3):
            engine.submit(handle, [handle + 1] * 4, max_new_tokens=12)
        for _ in range(5):
            engine.turn()
        engine.submit(9, [99] * 24, hand_over=KvReservation(1, EPOCH, bytes(16)), max_new_tokens=2)
        while 9 not in engine.finishes:
            engine.turn()
        assert engine.finishes[9].reserved_pages == 6 and not engine.finishes[9].retractions

    def test_pages_of_an_ended_reservation_are_copied_to_the_host(self) -> None:
        """The last chunk completes no page, so that the reservation has all pages before the request ends."""
        engine = worker(num_pages=32, host_pages=64, chunked_prefill_size=16, disaggregation_hold_s=5.0)
        engine.submit(0, list(range(100, 133)), hand_over=KvReservation(1, EPOCH, bytes(16)), max_new_tokens=2)
        engine.drain()
        opened = engine.executor.open_reservations[1]
        engine.core.release_reservation(ReservationReleased(opened.reservation, opened.opening))
        for _ in range(20):
            engine.turn()
        assert engine.core.stats().host_pages_used == 8

    def test_handed_over_request_ends_after_the_first_token_and_reserves_the_pages(self) -> None:
        pair = Pair()
        finish = pair.compute(0, [*PROMPT, 1, 2], max_new_tokens=8)
        assert finish.reason is FinishReason.HANDED_OVER and finish.completion_tokens == 1
        assert finish.reservation is not None and finish.reservation.epoch == EPOCH and finish.reserved_pages == 10
        memory = pair.first.core.memory
        assert memory.num_available == memory.pages.num_pages - 10, "the reservation pins the ten pages"
        assert pair.first.core.memory.slots.num_leased == 0, "the ended request has no slot"

    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_decode_worker_reads_the_pages_and_continues_the_handed_over_request(self, overlap: bool) -> None:
        pair = Pair(overlap=overlap, first={"overlap": overlap})
        finish = pair.answer(0, [*PROMPT, 1, 2], max_new_tokens=8)
        assert finish.cached_from == {Tier.DEVICE: 0, Tier.PEER: 40} and finish.cached_tokens == 40
        assert computed_tokens(pair.second) <= 3 + 8, "only the tokens after the last whole page and the output are computed"
        assert pair.second.core.stats().pulled_pages_total == 10
        pair.assert_all_is_free()

    def test_pull_reads_only_missing_pages(self) -> None:
        pair = Pair()
        pair.answer(0, [*PROMPT[:20], 1], max_new_tokens=2)
        pair.answer(1, [*PROMPT, 1], max_new_tokens=2)
        assert [len(operation.keys) for operation in pulls(pair.second)] == [5, 5]
        pair.answer(2, [*PROMPT, 2], max_new_tokens=2)
        assert len(pulls(pair.second)) == 2, "a prompt whose pages are all cached is not read"
        pair.assert_all_is_free()

    @pytest.mark.parametrize(
        ("params", "reason"),
        [
            ({"max_new_tokens": 1}, FinishReason.LENGTH),
            ({"max_new_tokens": 9, "stop_token_ids": (FIRST_TOKEN,)}, FinishReason.MATCHED_TOKEN),
        ],
        ids=["length", "stop token"],
    )
    def test_finished_request_is_not_handed_over(self, params: dict[str, Any], reason: FinishReason) -> None:
        pair = Pair()
        assert pair.compute(0, PROMPT, **params).reason is reason
        assert not len(pair.first.core.reservations)

    def test_prompt_of_less_than_a_page_has_no_reservation(self) -> None:
        pair = Pair()
        finish = pair.compute(0, [1, 2, 3], max_new_tokens=4)
        assert finish.reason is FinishReason.HANDED_OVER and finish.reservation is None
        pair.go_on(0, [1, 2, 3], max_new_tokens=4)
        pair.second.drain()
        pair.second.check_answer(0)

    def test_resumed_request_is_handed_over_with_the_next_token(self) -> None:
        pair = Pair()
        first = worker()
        first.submit(0, PROMPT, max_new_tokens=12, ignore_eos=True)
        first.drain()
        said = first.outputs[0][:6]
        pair.first.submit(0, PROMPT, hand_over=pair.new_reservation(), output=said, max_new_tokens=12, ignore_eos=True)
        pair.first.drain()
        finish = pair.first.finishes[0]
        assert finish.reason is FinishReason.HANDED_OVER and finish.reserved_pages == 11 and finish.reservation is not None
        output = [*said, *pair.first.outputs[0]]
        source = KvSource(finish.reservation, ADDRESS, finish.reserved_pages)
        pair.second.submit(0, PROMPT, output=output, source=source, max_new_tokens=12, ignore_eos=True)
        pair.second.drain()
        pair.second.check_answer(0)
        assert pair.second.core.stats().pulled_pages_total == 11

    def test_grammar_forces_no_token_before_the_handover(self) -> None:
        pair, spec = Pair(), GrammarSpec("json_schema", "1 9")
        pair.compute(0, PROMPT, max_new_tokens=12, grammar=spec)
        pair.go_on(0, PROMPT, max_new_tokens=12, grammar=spec)
        pair.second.drain()
        pair.second.check_answer(0)
        assert pair.second.core.stats().pulled_pages_total == 10

    def test_grammar_forces_no_token_before_the_handover_of_a_resumed_request(self) -> None:
        pair, runs = Pair(), spec(3, 60)
        alone = worker(num_pages=64)
        alone.book.ready.add(runs)
        alone.submit(0, PROMPT, max_new_tokens=60, grammar=runs)
        alone.drain()
        said = alone.outputs[0][:20]  # in the middle of a run of forced tokens
        pair.first.book.ready.add(runs)
        pair.first.submit(0, PROMPT, hand_over=pair.new_reservation(), output=said, max_new_tokens=60, grammar=runs)
        pair.first.drain()
        finish = pair.first.finishes[0]
        assert finish.reason is FinishReason.HANDED_OVER and finish.reserved_pages == 15
        assert pair.first.outputs[0] == alone.outputs[0][20:21]

    def test_each_logprob_is_sent_once_when_a_request_is_handed_over(self) -> None:
        pair = Pair()
        params: dict[str, Any] = {"max_new_tokens": 6, "top_logprobs": 2, "prompt_logprobs_from": 0}
        pair.compute(0, PROMPT, **params)
        pair.go_on(0, PROMPT, **params)
        pair.second.drain()
        pair.second.check_answer(0)
        assert len(pair.first.logprobs[0]) == 1 and len(pair.first.prompt_logprobs[0]) == 39

    @pytest.mark.parametrize("what", ["session", "embedding"])
    def test_handover_is_refused_for_sessions_and_embeddings(self, what: str) -> None:
        pair = Pair()
        pair.first.open_session("s")
        session = SessionTurn("s") if what == "session" else None
        params = {"embedding": EmbeddingParams()} if what == "embedding" else {}
        pair.first.submit(0, PROMPT, hand_over=pair.new_reservation(), session=session, max_new_tokens=4, **params)
        pair.first.drain()
        finish = pair.first.finishes[0]
        assert (finish.error, finish.field) == (ErrorCode.INVALID_ARGUMENT, "hand_over")


class TestReservation:
    def test_reservation_ends_when_the_decode_worker_has_read_the_pages(self) -> None:
        pair = Pair()
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.go_on(0, PROMPT, max_new_tokens=4)
        pair.second.drain()
        assert len(pair.first.core.reservations) == 1, "the reservation stays until the first worker receives the release"
        pair.turn()
        pair.assert_all_is_free()
        assert pair.first.core.stats().expired_rooms_total == 0

    def test_reservation_ends_at_the_time_limit(self) -> None:
        pair = Pair(first={"disaggregation_hold_s": 2.0})
        pair.compute(0, PROMPT, max_new_tokens=4)
        until = pair.first.core.reservations.next_expiry
        assert pair.first.now + 1.9 < until <= pair.first.now + 2.0
        pair.first.core.plan(until - 0.01)
        assert len(pair.first.core.reservations) == 1
        pair.first.core.plan(until)
        assert not len(pair.first.core.reservations), "the reservation ends exactly at its time limit"
        pair.first.turn()
        pair.assert_all_is_free()
        assert pair.first.core.stats().expired_rooms_total == 1

    def test_reservations_have_separate_time_limits(self) -> None:
        pair = Pair(first={"disaggregation_hold_s": 2.0})
        for handle in (0, 1):
            pair.compute(handle, [handle] * 40, max_new_tokens=4)
            pair.first.now += 1.0
        reservations = pair.first.core.reservations
        first = reservations.next_expiry
        pair.first.core.plan(first)
        assert len(reservations) == 1 and first + 0.9 < reservations.next_expiry < first + 2.0
        pair.first.core.plan(first + 2.0)
        assert reservations.expired_total == 2 and not len(reservations)

    def test_reservation_ends_with_the_gateway_stream(self) -> None:
        pair = Pair()
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.first.core.abort_peer(1, pair.first.now)
        assert len(pair.first.core.reservations) == 1
        pair.first.core.abort_peer(0, pair.first.now)
        pair.first.turn()
        pair.assert_all_is_free()
        assert not pair.first.executor.open_reservations

    def test_reservation_ends_when_the_request_is_aborted(self) -> None:
        pair = Pair()
        for handle in (0, 1):
            pair.compute(handle, [handle] * 40, max_new_tokens=4)
        pair.first.abort(1)
        assert len(pair.first.core.reservations) == 1
        pair.first.abort(0)
        pair.first.turn()
        pair.assert_all_is_free()

    def test_reservation_is_released_when_the_decode_worker_refuses_the_request(self) -> None:
        pair = Pair()
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.second.core.closed = "going away"
        pair.go_on(0, PROMPT, max_new_tokens=4)
        for _ in range(3):
            pair.turn()
        pair.assert_all_is_free()

    @pytest.mark.parametrize("how", ["flush", "weights"])
    def test_reservation_ends_when_the_pages_are_flushed_or_the_weights_are_replaced(self, how: str) -> None:
        pair = Pair()
        pair.compute(0, PROMPT, max_new_tokens=4)
        if how == "flush":
            assert pair.first.control.flush_cache() == 10
        else:
            pair.first.control.replace_weights("other")
        pair.first.turn()
        pair.assert_all_is_free()
        assert not pair.first.executor.open_reservations

    def test_reservation_ignores_the_release_of_another_reservation(self) -> None:
        pair = Pair()
        finish = pair.compute(0, PROMPT, max_new_tokens=4)
        assert finish.reservation is not None
        for other in (
            replace(finish.reservation, epoch=EPOCH + 1),
            replace(finish.reservation, secret=bytes(16)),
            pair.new_reservation(),
        ):
            pair.first.core.release_reservation(pair.release_of(other))
        assert len(pair.first.core.reservations) == 1
        pair.first.core.release_reservation(pair.release_of(finish.reservation))
        pair.first.core.release_reservation(pair.release_of(finish.reservation))
        assert not len(pair.first.core.reservations)

    def test_request_is_not_aborted_while_a_reservation_may_free_pages(self) -> None:
        """The pages become free at the reservation's time limit."""
        pair = Pair(first={"num_pages": 12, "disaggregation_hold_s": 1.0})
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.first.submit(1, [7] * 30, max_new_tokens=4, ignore_eos=True)
        for _ in range(300):
            pair.first.turn()
        pair.first.check_answer(1)
        assert pair.first.finishes[1].reason is FinishReason.LENGTH

    @pytest.mark.parametrize("how", ["time limit", "release"])
    def test_request_begins_when_a_reservation_frees_pages(self, how: str) -> None:
        """The request does not wait until a running request ends."""
        pair = Pair(first={"num_pages": 32, "disaggregation_hold_s": 1.0 if how == "time limit" else 100.0})
        finish = pair.compute(0, PROMPT, max_new_tokens=4)
        assert finish.reservation is not None
        pair.first.submit(1, [7] * 8, max_new_tokens=12, ignore_eos=True)
        for _ in range(3):
            pair.first.turn()
        pair.first.submit(2, [8] * 88, max_new_tokens=2, ignore_eos=True)
        pair.first.turn()
        assert pair.first.core.queues.batch_is_full
        pair.first.now += 1.0
        if how == "release":
            pair.first.core.release_reservation(pair.release_of(finish.reservation))
        pair.first.turn()
        assert sorted(r.handle for r in pair.first.core.queues.extending + pair.first.core.queues.decoding) == [1, 2]
        pair.first.drain()
        for handle in (1, 2):
            pair.first.check_answer(handle)

    def test_reservation_is_released_when_the_decode_worker_begins_the_request(self) -> None:
        """The release does not wait for the end of the request."""
        pair = Pair()
        pair.answer(0, PROMPT, max_new_tokens=4)
        pair.compute(1, PROMPT[:20], max_new_tokens=60)
        pair.go_on(1, PROMPT[:20], max_new_tokens=60)
        for _ in range(4):
            pair.turn()
        assert 1 not in pair.second.finishes and not len(pair.first.core.reservations)
        pair.second.drain()
        pair.second.check_answer(1)

    def test_request_does_not_wait_for_a_reservation_that_has_no_missing_pages(self) -> None:
        pair = Pair()
        pair.answer(0, PROMPT, max_new_tokens=4)
        finish = pair.compute(1, PROMPT, max_new_tokens=4)
        assert finish.reservation is not None and finish.reserved_pages == 10
        source = KvSource(finish.reservation, ADDRESS, finish.reserved_pages)
        pair.second.submit(1, [*PROMPT, *range(8)], output=[1], source=source, max_new_tokens=4, ignore_eos=True)
        assert not pair.second.core.queues.importing

    def test_reservation_is_closed_before_a_step_may_overwrite_the_pages(self) -> None:
        """The running read gets no page."""
        pair = Pair(page_moved_s=1.0, first={"num_pages": 12, "disaggregation_hold_s": 1.0})
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.go_on(0, PROMPT, max_new_tokens=4)
        pair.second.turn()
        assert pulls(pair.second)
        pair.first.now += 1.0
        pair.first.submit(1, [7] * 40, max_new_tokens=2, ignore_eos=True)
        pair.first.drain()
        pair.second.now += 30.0
        pair.second.drain()
        pair.second.check_answer(0)
        assert pair.second.core.stats().pulled_pages_total == 0
        assert pair.second.core.stats().refused_pulls_total == len(pulls(pair.second)) > 0


class TestPull:
    def test_pull_gets_no_page_when_the_secret_or_the_salt_differs(self) -> None:
        """The prefill worker refuses both reads. The decode worker then computes the prompt."""
        pair = Pair()
        mine = pair.compute(0, PROMPT, max_new_tokens=4)
        other = pair.compute(1, [9] * 40, max_new_tokens=4)
        assert mine.reservation is not None and other.reservation is not None
        for handle, reservation, salt in (
            (10, replace(mine.reservation, secret=other.reservation.secret), ""),
            (11, mine.reservation, "salt"),
            (12, other.reservation, ""),
        ):
            source, output = KvSource(reservation, ADDRESS, 10), pair.first.outputs[0]
            pair.second.submit(handle, PROMPT, output=output, source=source, salt=salt, ignore_eos=True, max_new_tokens=4)
            pair.second.drain()
            pair.second.check_answer(handle)
            pair.second.control.flush_cache()
        assert pair.second.core.stats().pulled_pages_total == 0 and len(pulls(pair.second)) == 3

    def test_pull_from_a_lost_worker_fails_and_the_prompt_is_computed(self) -> None:
        pair = Pair()
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.second.executor.peers.clear()
        pair.go_on(0, PROMPT, max_new_tokens=4)
        pair.second.drain()
        pair.second.check_answer(0)
        stats = pair.second.core.stats()
        assert stats.refused_pulls_total == stats.failed_operations_total == 1 and stats.pulled_pages_total == 0

    def test_pull_is_abandoned_when_computing_is_faster(self) -> None:
        pair = Pair(page_moved_s=100.0)
        tiers = pair.second.core.tiers
        assert tiers is not None
        tiers.rates._token_s = None
        tiers.rates.computed(1000, 0, 10.0)
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.go_on(0, PROMPT, max_new_tokens=4)
        for _ in range(200):
            pair.second.turn()
        pair.second.check_answer(0)
        assert pair.second.core.stats().given_up_operations_total == 1
        pair.second.now += 2000.0
        pair.second.turn()
        assert not pair.second.core.memory.quarantined

    def test_failed_read_from_one_worker_does_not_prevent_reads_from_another_worker(self) -> None:
        pair = Pair()
        other = worker()
        pair.second.executor.peers["other"] = other.executor
        late = pair.second.executor
        late.pages_moved = lambda operation: (
            0 if operation.pull and operation.pull.source.address == "other" else len(operation.keys)
        )
        reservation = pair.new_reservation()
        pair.second.submit(7, [5] * 40, output=[1], source=KvSource(reservation, "other", 10), max_new_tokens=3, ignore_eos=True)
        pair.answer(0, PROMPT, max_new_tokens=4)
        assert pair.second.core.stats().pulled_pages_total == 10

    def test_hung_worker_does_not_delay_reads_from_another_worker(self) -> None:
        """One request arrives while the read from the hung worker runs. Another arrives after the core has given up this read."""
        pair = Pair(num_pages=64, first={"num_pages": 64})
        tiers, executor = pair.second.core.tiers, pair.second.executor
        assert tiers is not None
        tiers.rates._token_s = None
        tiers.rates.computed(1000, 0, 10.0)
        late, facts = {"other", ADDRESS}, executor.facts

        def not_of_late_ones() -> list[Fact]:
            addresses = {each.op_id: each.pull.source.address for each in pulls(pair.second) if each.pull is not None}
            done, kept = [], []
            for fact in [*held, *facts()]:
                (kept if addresses[fact.op_id] in late else done).append(fact)
            held[:] = kept
            return done

        held: list[Fact] = []
        executor.facts = not_of_late_ones  # type: ignore[method-assign]
        for handle in (0, 1):
            pair.compute(handle, [handle] * 40, max_new_tokens=4)
        source = KvSource(pair.new_reservation(), "other", 10)
        pair.second.submit(7, [7] * 40, output=[1], source=source, max_new_tokens=3, ignore_eos=True)
        pair.second.turn()
        pair.second.now += 0.3
        pair.go_on(0, [0] * 40, max_new_tokens=4)
        pair.second.turn()
        pair.second.now += 0.2
        pair.second.turn()
        assert pair.second.core.stats().given_up_operations_total == 1, "only the read from the hung worker is given up"
        late.remove(ADDRESS)
        pair.go_on(1, [1] * 40, max_new_tokens=4)
        for _ in range(30):
            pair.second.turn()
        for handle in (0, 1):
            pair.second.check_answer(handle)
            assert pair.second.finishes[handle].cached_from[Tier.PEER] == 40

    def test_pull_continues_when_all_pulls_together_are_faster_than_computing(self) -> None:
        """Each read alone takes longer than computing its page, but all reads together take less than computing all pages."""
        pair = Pair(page_moved_s=0.05)
        tiers = pair.second.core.tiers
        assert tiers is not None
        tiers._imports._at_once, tiers.rates._token_s = 1, 0.0132
        tiers.rates._lanes[ADDRESS] = pair.second.config.page_bytes / 0.05
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.go_on(0, PROMPT, max_new_tokens=4)
        for _ in range(80):
            pair.second.turn()
        pair.second.check_answer(0)
        assert pair.second.finishes[0].cached_from[Tier.PEER] >= 28, (
            "the last pages are computed, because too few pages follow them"
        )

    @pytest.mark.parametrize("aborted", [False, True], ids=["waited for", "of an aborted request"])
    def test_late_pull_also_ends_the_wait_for_the_following_pulls(self, aborted: bool) -> None:
        """A hung worker delays each of its requests only once."""
        pair = Pair(page_moved_s=100.0, num_pages=64, first={"num_pages": 64})
        tiers = pair.second.core.tiers
        assert tiers is not None
        tiers.rates._token_s = None
        tiers.rates.computed(1000, 0, 10.0)
        for handle in range(3):
            pair.compute(handle, [handle] * 40, max_new_tokens=4)
        for handle in range(3):
            pair.go_on(handle, [handle] * 40, max_new_tokens=4)
        pair.second.turn()
        if aborted:
            pair.second.abort(0)
        for _ in range(400):
            pair.second.turn()
        for handle in range(3):
            pair.second.check_answer(handle)
        assert pair.second.core.stats().given_up_operations_total >= 2

    def test_second_reservation_is_read_when_the_first_has_ended(self) -> None:
        pair = Pair(page_moved_s=0.05)
        for handle in (0, 1):
            pair.compute(handle, PROMPT, max_new_tokens=4, seed=handle)
        reservation = pair.first.finishes[0].reservation
        assert reservation is not None
        pair.first.core.release_reservation(pair.release_of(reservation))
        pair.first.turn()
        for handle in (0, 1):
            pair.go_on(handle, PROMPT, max_new_tokens=4, seed=handle)
        pair.second.drain()
        for handle in (0, 1):
            pair.second.check_answer(handle)
        assert pair.second.core.stats().pulled_pages_total == 10

    def test_stats_report_that_pulls_are_slower_than_computing(self) -> None:
        pair = Pair()
        tiers = pair.second.core.tiers
        assert tiers is not None and not pair.second.core.stats().pulls_lose
        tiers.rates.moved(Tier.PEER, 1, 1e6, ADDRESS)
        tiers.rates._token_s = 1e-9
        assert pair.second.core.stats().pulls_lose

    def test_pulls_of_one_prompt_read_each_page_once(self) -> None:
        pair = Pair(page_moved_s=0.05)
        for handle in (0, 1):
            pair.compute(handle, PROMPT, max_new_tokens=4, seed=handle)
        for handle in (0, 1):
            pair.go_on(handle, PROMPT, max_new_tokens=4, seed=handle)
        pair.second.drain()
        for handle in (0, 1):
            pair.second.check_answer(handle)
        assert pair.second.core.stats().pulled_pages_total == 10
        pair.turn()
        pair.assert_all_is_free()

    def test_aborted_request_releases_the_reservation_and_frees_the_pages_when_the_read_ends(self) -> None:
        pair = Pair(page_moved_s=0.1)
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.go_on(0, PROMPT, max_new_tokens=4)
        pair.second.turn()
        assert pair.second.core.memory.quarantined
        pair.second.abort(0)
        assert pair.second.core.memory.quarantined, "the running read keeps its pages quarantined"
        pair.second.now += 5.0
        for _ in range(3):
            pair.turn()
        pair.assert_all_is_free()

    def test_pull_continues_during_a_pause(self) -> None:
        pair = Pair()
        pair.compute(0, PROMPT, max_new_tokens=4)
        pair.second.control.pause(PauseMode.IN_PLACE, pair.second.now)
        pair.go_on(0, PROMPT, max_new_tokens=4)
        for _ in range(5):
            pair.turn()
        assert pair.second.core.stats().pulled_pages_total == 10
        pair.second.control.resume()
        pair.second.drain()
        pair.second.check_answer(0)

    def test_pulled_pages_are_copied_to_the_host(self) -> None:
        pair = Pair(host_pages=64)
        pair.answer(0, PROMPT, max_new_tokens=4)
        for _ in range(20):
            pair.second.turn()
        assert pair.second.core.stats().backed_up_pages_total >= 10

    def test_pulled_pages_are_lost_when_evicted_before_a_copy(self) -> None:
        """The prefill worker's pages do not count as a copy, because the prefill worker frees them soon."""
        pair = Pair(host_pages=64)
        pair.second.core.begins_copies = False
        pair.answer(0, PROMPT, max_new_tokens=4)
        pair.second.submit(1, [9] * 120, max_new_tokens=2, ignore_eos=True)
        pair.second.drain()
        assert pair.second.core.stats().lost_pages_total >= 10

    @pytest.mark.parametrize("host_pages", [0, 64])
    def test_worker_that_cannot_pull_pages_computes_the_prompt(self, host_pages: int) -> None:
        pair, alone = Pair(), worker(host_pages=host_pages)
        finish = pair.compute(0, PROMPT, max_new_tokens=4)
        assert finish.reservation is not None
        source = KvSource(finish.reservation, ADDRESS, finish.reserved_pages)
        alone.submit(0, PROMPT, output=pair.first.outputs[0], source=source, max_new_tokens=4, ignore_eos=True)
        alone.drain()
        alone.check_answer(0)
        assert not pulls(alone)


def test_proof_depends_on_the_secret_and_the_tree_and_the_tokens() -> None:
    base = proof(bytes(16), "tree", b"tokens")
    others = [proof(b"1" * 16, "tree", b"tokens"), proof(bytes(16), "tre", b"etokens"), proof(bytes(16), "tree", b"token")]
    assert base not in others and len(set(others)) == 3 and base == proof(bytes(16), "tree", b"tokens")


def test_prover_returns_the_proof_of_each_prefix() -> None:
    prover = Prover(bytes(16), "tree", b"some tokens")
    assert [prover.up_to(end) for end in (4, 4, 11)] == [proof(bytes(16), "tree", b"some tokens"[:end]) for end in (4, 4, 11)]


@settings(max_examples=1000 if NIGHTLY else 60, deadline=None)
@given(st.data())
def test_random_pulls_change_no_output_and_leak_no_page(data: st.DataObject) -> None:
    """Random prompts share prefixes; reads have any length; reservations end early; requests are aborted; pools are too small.

    Both pools are checked after every call, and freed pages are poisoned.
    """
    draw = data.draw
    moved_s = draw(st.sampled_from([0.0, 0.02, 0.3]))
    hold_s = draw(st.sampled_from([0.05, 0.5, 10.0]))
    second = {"num_pages": draw(st.sampled_from([14, 24, 48])), "host_pages": draw(st.sampled_from([0, 40]))}
    pair = Pair(moved_s, {"num_pages": draw(st.sampled_from([14, 40])), "disaggregation_hold_s": hold_s}, **second)
    prompts: dict[int, list[int]] = {}
    waiting: list[int] = []
    for handle in range(draw(st.integers(1, 8))):
        head, tail = draw(st.integers(0, 1)), draw(st.integers(0, 9))
        prompts[handle] = [head] * draw(st.integers(3, 30)) + [handle] * tail
        pair.first.submit(handle, prompts[handle], hand_over=pair.new_reservation(), max_new_tokens=6, ignore_eos=True)
        for _ in range(draw(st.integers(0, 6))):
            waiting += _step(pair, draw(st.sampled_from(["turn", "turn", "abort", "flush", "clock"])), prompts)
    for _ in range(10_000):  # a turn takes 10 ms; a page may take 300 ms, and pages are read one after another
        _step(pair, "turn", prompts)
        if pair.first.core.idle and pair.second.core.idle and set(prompts) <= set(pair.first.finishes):
            break
    assert pair.second.core.idle, "no request waits for ever"
    pair.assert_answers_and_ends()


def _step(pair: Pair, what: str, prompts: dict[int, list[int]]) -> list[int]:
    """Applies one random event and runs a turn. Returns the requests that continue on the second worker."""
    match what:
        case "abort" if pair.second.core.num_requests:
            pair.second.abort(next(iter(pair.second.core.queues.by_key.values())).handle)
        case "flush":
            pair.first.control.flush_cache()
            pair.first.check()
        case "clock":
            pair.first.now += 0.1
    pair.turn()
    begun = [h for h, f in pair.first.finishes.items() if f.reason is FinishReason.HANDED_OVER and h not in pair.second.submitted]
    for handle in begun:
        pair.go_on(handle, prompts[handle], max_new_tokens=6)
    return begun


def test_worker_pulls_pages_when_compute_time_is_not_measured() -> None:
    pair = Pair()
    pair.second = worker(reads_peers=True)
    pair.second.executor.peers[ADDRESS] = pair.first.executor
    pair.answer(0, PROMPT, max_new_tokens=4)
    assert pair.second.core.stats().pulled_pages_total == 10
