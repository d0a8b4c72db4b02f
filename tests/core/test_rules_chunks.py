"""Rules for pages that are read while a prefill worker still computes their prompt: announcements, reservations and pins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.messages import FinishReason, PagesReady, Prefetch
from rootstock_llm.services.worker.core.contracts.reservations import KvSource, OpenReservation
from rootstock_llm.services.worker.core.contracts.transfers import OperationKind, Tier
from rootstock_llm.services.worker.core.tiers.prefetches import MOST_PREFETCHES
from tests.core.harness import Engine
from tests.core.peers import ADDRESS, Relayed, computed_tokens
from tests.night import NIGHTLY

PROMPT = list(range(42))  # ten and a half pages, in chunks of four pages


def pulled(engine: Engine) -> list[int]:
    """Returns the number of pages of each read from another worker."""
    return [len(op.keys) for plan in engine.plans for op in plan.operations if op.kind is OperationKind.PULL]


def num_reservations(pair: Relayed) -> int:
    return len(pair.first.core.reservations)


class TestAnnouncements:
    @pytest.mark.parametrize("overlap", [True, False])
    def test_prefetch_reads_each_chunk_while_the_next_chunk_is_computed(self, overlap: bool) -> None:
        pair = Relayed(overlap=overlap, first={"overlap": overlap})
        pair.begin(0, list(range(74)), max_new_tokens=8)
        pair.until(lambda: pair.second.core.stats().pulled_pages_total == 8)
        assert 0 not in pair.first.finishes, "the prefill worker has not computed the last chunk yet"
        finish = pair.finish(0, max_new_tokens=8)
        assert [ready.num_pages for ready in pair.reports[0]] == [4, 8, 12, 16]
        assert sum(pulled(pair.second)) == 18 == pair.second.core.stats().pulled_pages_total, "each page is read once"
        assert finish.cached_from == {Tier.DEVICE: 0, Tier.PEER: 72} and computed_tokens(pair.second) <= 3 + 8
        assert pair.second.core.stats().prefetched_pages_total >= 12
        assert pair.first.core.stats().rooms_total == 1, "a single reservation grows with the prompt"
        pair.assert_all_is_free()

    def test_prefetch_reads_only_missing_pages(self) -> None:
        pair = Relayed()
        pair.answer(1, PROMPT[:24], max_new_tokens=2)
        pair.begin(0, PROMPT, max_new_tokens=2)
        pair.finish(0, max_new_tokens=2)
        assert [ready.num_pages for ready in pair.reports[0]] == [6, 10], "one report announces all six cached pages"
        assert sum(pulled(pair.second)) == 10
        pair.assert_all_is_free()

    def test_prompt_of_one_chunk_is_not_prefetched(self) -> None:
        pair = Relayed()
        pair.begin(0, PROMPT[:14], max_new_tokens=2)
        pair.finish(0, max_new_tokens=2)
        assert not pair.reports and pair.second.core.stats().prefetched_pages_total == 0

    def test_request_without_handover_announces_no_page(self) -> None:
        pair = Relayed()
        pair.first.submit(0, PROMPT, max_new_tokens=2, ignore_eos=True)
        pair.first.drain()
        assert not pair.first.ready and pair.first.core.stats().rooms_total == 0

    def test_prefetch_reads_the_pages_of_the_earlier_output_of_a_resumed_request(self) -> None:
        pair = Relayed()
        pair.first.submit(9, PROMPT, max_new_tokens=30, ignore_eos=True)
        pair.first.drain()
        pair.first.control.flush_cache()
        said = pair.first.outputs[9][:20]
        pair.begin(0, PROMPT, output=said, max_new_tokens=30)
        pair.prompts[0] = [*PROMPT, *said]
        pair.until(lambda: 0 in pair.first.finishes)
        output, finish = [*said, *pair.first.outputs[0]], pair.first.finishes[0]
        assert finish.reservation is not None and finish.reserved_pages == 15
        source = KvSource(finish.reservation, ADDRESS, finish.reserved_pages)
        pair.second.submit(0, PROMPT, output=output, source=source, max_new_tokens=30, ignore_eos=True)
        pair.until(lambda: 0 in pair.second.finishes)
        pair.second.check_answer(0)
        assert sum(pulled(pair.second)) == 15 and pair.second.core.stats().prefetched_pages_total == 12


def preempting(hold_s: float = 10.0, num_pages: int = 32, before: list[int] | None = None) -> Relayed:
    """Returns a pair in which a more urgent request takes the only slot while the second chunk is in flight.

    Args:
        hold_s: lifetime of a reservation.
        num_pages: pages of the prefill worker.
        before: prompt of an earlier request, whose reservation is still open; None for no earlier request.
    """
    first = {"enable_priority_scheduling": True, "max_running_requests": 1, "disaggregation_hold_s": hold_s}
    pair = Relayed(first={**first, "num_pages": num_pages})
    if before is not None:
        pair.compute(9, before, max_new_tokens=4)
    pair.begin(0, PROMPT, max_new_tokens=4)
    pair.until(lambda: bool(pair.reports))
    pair.first.submit(1, [7] * 40, priority=9, max_new_tokens=30, ignore_eos=True)
    pair.first.turn()
    assert pair.first.core.stats().preemptions_total == 1
    return pair


class TestPreemptedPrompts:
    def test_reservation_stays_open_while_the_request_is_preempted(self) -> None:
        pair = preempting()
        pair.second.executor.peers.clear()  # no page can be read while request 1 runs
        reservations = pair.first.core.reservations
        assert len(reservations) == 1 and reservations.may_end
        pair.until(lambda: 1 in pair.first.finishes)
        pair.second.executor.peers[ADDRESS] = pair.first.executor
        pair.finish(0, max_new_tokens=4)
        assert pair.first.core.stats().expired_rooms_total == 0
        assert pair.second.core.stats().pulled_pages_total == 10
        pair.assert_all_is_free()

    def test_reservation_expires_while_the_request_waits(self) -> None:
        pair = preempting(hold_s=0.05)
        pair.until(lambda: num_reservations(pair) == 0)
        assert pair.first.core.stats().expired_rooms_total == 1 and 1 not in pair.first.finishes
        pair.until(lambda: 0 in pair.first.finishes)
        finish = pair.first.finishes[0]
        assert finish.reason is FinishReason.HANDED_OVER and finish.reserved_pages == 10, "a new reservation has the whole prompt"
        assert len(pair.reports[0]) == 1, "the new reservation is not announced to the decode worker"
        pair.finish(0, max_new_tokens=4)
        assert pair.second.core.stats().pulled_pages_total == 10 and computed_tokens(pair.second) <= 3 + 4
        pair.assert_all_is_free()

    def test_reservation_that_ends_before_the_next_report_is_never_reported_as_open(self) -> None:
        pair = Relayed()
        pair.answer(0, PROMPT, max_new_tokens=2)
        core, reservation = pair.first.core, pair.new_reservation()
        hit = core.memory.match("", np.array(PROMPT[:24], dtype=np.int32).tobytes(), 24)
        opened = OpenReservation(reservation, "", b"", core.memory.tree.pages_to(hit))
        for times in (1, 2):
            for _ in range(times):
                core.reservations.end_of_request((0, 9))
                core.reservations.open(opened, (0, 9), hit, core.memory)
            if times == 1:
                core.reservations.end_of_request((0, 9))
            events = core.take_reservation_events()
            assert events is not None and events.closed == (reservation,)
            assert [each.reservation for each in events.opened] == ([reservation] if times == 2 else []), (
                "only a reservation that is still open is reported"
            )

    def test_reservation_of_a_waiting_prompt_ends_when_running_requests_need_pages(self) -> None:
        pair = preempting(num_pages=20, before=[5] * 8)
        pair.until(lambda: 1 in pair.first.finishes)
        pair.first.check_answer(1)
        whole = pair.first.finishes[9].reservation
        assert whole is not None and pair.first.core.reservations.is_open(whole), "the reservation of a complete prompt stays"
        assert num_reservations(pair) == 1 and pair.first.core.stats().expired_rooms_total == 0, (
            "the running request has ended the growing reservation without an expiry"
        )
        pair.first.abort(9)
        pair.finish(0, max_new_tokens=4)
        pair.assert_all_is_free()

    @pytest.mark.parametrize("put_back", [False, True], ids=["at first", "again"])
    def test_reservation_has_no_time_limit_while_the_prompt_is_computed(self, put_back: bool) -> None:
        if put_back:
            pair = preempting(hold_s=1.0)
            pair.until(lambda: [request.handle for request in pair.first.core.queues.extending] == [0])
        else:
            pair = Relayed(first={"disaggregation_hold_s": 0.5})
            pair.begin(0, PROMPT, max_new_tokens=4)
            pair.until(lambda: bool(pair.reports))
        pair.first.now += 5.0
        pair.turn()
        assert num_reservations(pair) == 1
        pair.finish(0, max_new_tokens=4)
        assert pair.first.core.stats().expired_rooms_total == 0

    def test_growing_reservation_ignores_a_release(self) -> None:
        """Another decode worker may still read the reservation."""
        pair = Relayed()
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: bool(pair.reports))
        pair.first.core.release_reservation(pair.release_of(pair.reports[0][0].reservation))
        assert num_reservations(pair) == 1
        pair.finish(0, max_new_tokens=4)
        assert pair.second.core.stats().pulled_pages_total == 10
        pair.assert_all_is_free()

    @pytest.mark.parametrize("since", ["grown", "opened again"])
    def test_reservation_ignores_a_release_that_was_sent_for_an_earlier_version(self, since: str) -> None:
        """If a reader is lost while the prompt is computed, the next reader must find the reservation."""
        pair = Relayed() if since == "grown" else preempting(hold_s=0.05)
        if since == "grown":
            pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: bool(pair.reports.get(0)))
        release = pair.release_of(pair.reports[0][0].reservation)
        pair.until(lambda: 0 in pair.first.finishes)
        assert pair.first.core.stats().expired_rooms_total == (since == "opened again")
        pair.first.core.release_reservation(release)
        assert num_reservations(pair) == 1
        pair.finish(0, max_new_tokens=4)
        assert pair.second.core.stats().pulled_pages_total == 10
        pair.assert_all_is_free()


class TestReservationEnds:
    @pytest.mark.parametrize("how", ["abort", "gateway leaves", "failed step", "flush"])
    def test_reservation_ends_when_the_request_ends_or_the_pages_are_flushed(self, how: str) -> None:
        pair = Relayed(page_moved_s=0.05)
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: bool(pulled(pair.second)))
        match how:
            case "abort":
                pair.first.abort(0)
            case "gateway leaves":
                pair.first.core.abort_peer(0, pair.first.now)
            case "flush":
                pair.first.control.flush_cache()
            case "failed step":
                pair.first.executor.fail_steps.add(pair.first.plans[-1].step_id)
                assert pair.first.prev is not None
                pair.first.core.fail(pair.first.prev.plan.step_id, "made to fail", pair.first.now)
                pair.first.prev = None
        assert num_reservations(pair) == 0
        if how == "flush":
            pair.finish(0, max_new_tokens=4)
            assert pair.second.core.stats().pulled_pages_total == 10, "all pages come from the new reservation"
        else:
            for _ in range(20):
                pair.turn()
            assert pair.second.core.stats().pulled_pages_total == 0 < pair.second.core.stats().refused_pulls_total
            pair.second.abort(0)
        pair.assert_all_is_free()

    def test_reservation_of_a_deleted_salt_is_not_opened_again(self) -> None:
        pair = Relayed(first={"disaggregation_hold_s": 60.0})
        pair.begin(0, PROMPT, salt="s", max_new_tokens=4)
        pair.until(lambda: bool(pair.reports))
        pair.first.control.forget_salt("s", [Tier.DEVICE])
        pair.until(lambda: 0 in pair.first.finishes)
        assert pair.first.finishes[0].reason is FinishReason.HANDED_OVER and pair.first.finishes[0].reservation is None
        pair.turn()
        assert (
            num_reservations(pair) == 0
            and not pair.first.executor.open_reservations
            and not pair.first.core.memory.tree.num_pages
        )

    @pytest.mark.parametrize("how", ["abort", "gateway leaves", "time limit"])
    def test_prefetched_pages_are_released_when_no_request_arrives(self, how: str) -> None:
        pair = Relayed(disaggregation_hold_s=0.5)
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: pair.second.core.stats().pulled_pages_total > 0)
        memory = pair.second.core.memory
        pair.second.turn()
        assert memory.num_available < memory.pages.num_pages and not memory.quarantined, "prefetched pages stay pinned"
        if how == "time limit":
            pair.second.now += 0.5
            pair.second.turn()
        elif how == "abort":
            pair.second.abort(0)
        else:
            pair.second.core.abort_peer(0, pair.second.now)
        assert memory.num_available == memory.pages.num_pages and memory.tree.num_pages
        assert not len(pair.second.core.queues.importing)

    @pytest.mark.parametrize("how", ["abort", "gateway leaves", "time limit", "request aborted", "request late", "flush"])
    def test_waiting_request_begins_when_prefetched_pages_are_released(self, how: str) -> None:
        """Covers prefetched pages whose request has not arrived, and prefetched pages whose request already waits."""
        pair = Relayed(disaggregation_hold_s=5.0, num_pages=24)
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: pair.second.core.stats().pulled_pages_total == 8)
        second = pair.second
        for handle, prompt in ((5, [9] * 5), (6, [8] * 60)):
            second.submit(handle, prompt, peer=1, max_new_tokens=6 if handle == 6 else 20, ignore_eos=True)
            second.turn()
        if how.startswith("request"):
            second.submit(0, PROMPT, timeout_s=1.0, max_new_tokens=4)
        second.turn()
        queues = second.core.queues
        assert queues.batch_is_full and len(queues.waiting) == 1 + (0 in second.submitted) and queues.num_running == 1
        if how == "time limit":
            second.now += 5.0
        elif how == "request late":
            second.now += 1.0
        elif how == "flush":
            second.control.flush_cache()
        elif how == "gateway leaves":
            second.core.abort_peer(0, second.now)
        else:
            second.abort(0)
        second.turn()
        assert not len(queues.waiting) and queues.num_running == 2

    def test_pages_of_an_aborted_prefetch_are_freed_when_the_running_read_ends(self) -> None:
        pair = Relayed(page_moved_s=0.1)
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: bool(pair.second.core.memory.quarantined))
        pair.second.abort(0)
        assert pair.second.core.memory.quarantined, "the running read keeps its pages quarantined"
        pair.second.now += 5.0
        pair.second.turn()
        memory = pair.second.core.memory
        assert memory.num_available == memory.pages.num_pages


class TestPrefetchedPages:
    def test_request_takes_over_running_reads_of_the_prefetch(self) -> None:
        pair = Relayed(page_moved_s=0.04)
        pair.begin(0, PROMPT, max_new_tokens=4)
        finish = pair.finish(0, max_new_tokens=4)
        assert sum(pulled(pair.second)) == 10 and finish.cached_from[Tier.PEER] == 40
        pair.assert_all_is_free()

    def test_prefetched_pages_stay_pinned_while_the_request_waits(self) -> None:
        """All pages of the prompt were prefetched, so the request searches no other tier."""
        pair = Relayed(max_running_requests=1)
        pair.second.submit(5, [9] * 5, max_new_tokens=60, ignore_eos=True)
        pair.begin(0, PROMPT[:34], max_new_tokens=4)
        pair.until(lambda: 0 in pair.first.finishes and pair.second.core.stats().pulled_pages_total == 8)
        pair.go_on(0, pair.prompts[0], max_new_tokens=4)
        pair.turn()
        memory = pair.second.core.memory
        memory.flush()
        assert not pair.second.core.queues.importing and memory.tree.num_pages >= 8
        pair.second.abort(0)
        memory.flush()
        assert memory.tree.num_pages < 8

    def test_announcement_is_ignored_when_repeated_or_late_or_for_another_reservation(self) -> None:
        pair = Relayed()
        pair.begin(0, list(range(74)), max_new_tokens=4)
        pair.until(lambda: len(pair.reports.get(0, ())) == 2)
        assert 0 not in pair.first.finishes
        first, second = pair.reports[0]
        for ready in (
            second,
            first,
            replace(second, reservation=pair.new_reservation(), num_pages=18),
            PagesReady(77, first.reservation, 4),
        ):
            pair.second.core.prefetch_more(0, ready, pair.second.now)
            pair.tell(first)
        pair.finish(0, max_new_tokens=4)
        assert sum(pulled(pair.second)) == 18 and pair.second.core.stats().refused_pulls_total == 0

    def test_prefetch_reads_no_page_beyond_the_prompt(self) -> None:
        pair = Relayed()
        pair.compute(0, PROMPT, max_new_tokens=4)
        reservation = pair.first.finishes[0].reservation
        assert reservation is not None
        ids = np.array(PROMPT[:23], dtype=np.int32)
        pair.second.core.prefetch(Prefetch(0, 0, ids, KvSource(reservation, ADDRESS, 1 << 31)), pair.second.now)
        for _ in range(4):
            pair.turn()
        assert pulled(pair.second) == [5] and pair.second.core.stats().pulled_pages_total == 5

    def test_prefetched_pages_get_the_rank_of_the_request(self) -> None:
        pair = Relayed(enable_priority_scheduling=True)
        pair.compute(0, PROMPT, max_new_tokens=4)
        reservation = pair.first.finishes[0].reservation
        assert reservation is not None
        ids, core = np.array(PROMPT, dtype=np.int32), pair.second.core
        core.prefetch(Prefetch(0, 0, ids, KvSource(reservation, ADDRESS, 10), priority=5), pair.second.now)
        for _ in range(4):
            pair.turn()
        hit = core.memory.match("", ids.tobytes(), len(ids))
        assert hit.depth == 10 and hit.rank == core.config.rank(5) != core.config.rank(0)

    def test_prefetch_stops_after_a_failed_read(self) -> None:
        pair = Relayed()
        pair.second.executor.peers.clear()
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: 0 in pair.first.finishes)
        assert pulled(pair.second) == [4] and len(pair.reports[0]) == 2
        pair.second.executor.peers[ADDRESS] = pair.first.executor
        pair.finish(0, max_new_tokens=4)
        assert pulled(pair.second) == [4, 10]
        pair.assert_all_is_free()

    def test_prefetch_reads_no_page_when_computing_is_faster(self) -> None:
        pair = Relayed()
        tiers = pair.second.core.tiers
        assert tiers is not None
        tiers.rates.moved(Tier.PEER, 1, 1e6, ADDRESS)
        tiers.rates._token_s = 1e-9
        rate = tiers.rates.bytes_s(Tier.PEER, ADDRESS)
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: 0 in pair.first.finishes)
        assert len(pair.reports[0]) == 2 and tiers.rates.bytes_s(Tier.PEER, ADDRESS) == rate, (
            "a refused prefetch leaves the rate unchanged"
        )
        pair.finish(0, max_new_tokens=4)
        assert not pulled(pair.second)
        assert rate < tiers.rates.bytes_s(Tier.PEER, ADDRESS) < rate * 1.2, "a refused read of the request raises the rate"

    def test_prefetches_of_one_prompt_read_each_page_once(self) -> None:
        pair = Relayed(page_moved_s=0.02)
        for handle in (0, 1):
            pair.begin(handle, PROMPT, max_new_tokens=4, seed=handle)
        pair.until(lambda: {0, 1} <= set(pair.first.finishes))
        for handle in (0, 1):
            pair.finish(handle, max_new_tokens=4, seed=handle)
        assert sum(pulled(pair.second)) == 10
        pair.assert_all_is_free()

    def test_pinned_prefetched_pages_are_evicted_when_a_running_request_needs_pages(self) -> None:
        pair = Relayed(num_pages=16)
        pair.begin(0, PROMPT, max_new_tokens=4)
        pair.until(lambda: pair.second.core.stats().pulled_pages_total == 8)
        pair.second.submit(5, [9] * 30, max_new_tokens=30, ignore_eos=True)
        for _ in range(60):
            pair.second.turn()
        pair.second.check_answer(5)
        pair.finish(0, max_new_tokens=4)
        pair.assert_all_is_free()

    @pytest.mark.parametrize("why", ["weights", "too long", "in use", "going away", "no remote reads", "settling"])
    def test_prefetch_is_ignored_when_not_possible(self, why: str) -> None:
        pair = Relayed()
        pair.compute(0, PROMPT, max_new_tokens=4)
        reservation = pair.first.finishes[0].reservation
        assert reservation is not None
        prompt, second = list(PROMPT), pair.second
        match why:
            case "too long":
                prompt = [*PROMPT, *range(100)]
            case "in use":
                second.submit(0, [1, 2, 3], max_new_tokens=40, ignore_eos=True)
            case "going away":
                second.core.closed = "going away"
            case "no remote reads":
                second = pair.first
            case "settling":
                second.core.begins_copies = False
        ids, revision = np.array(prompt, dtype=np.int32), "others" if why == "weights" else ""
        second.core.prefetch(Prefetch(0, 0, ids, KvSource(reservation, ADDRESS, 10), revision=revision), second.now)
        second.core.prefetch_more(0, PagesReady(0, reservation, 11), second.now)
        for _ in range(4):
            second.turn()
        assert not pulled(second)

    def test_number_of_prefetches_is_limited(self) -> None:
        pair = Relayed()
        pair.compute(0, PROMPT, max_new_tokens=4)
        reservation = pair.first.finishes[0].reservation
        assert reservation is not None
        ids, tiers = np.array(PROMPT, dtype=np.int32), pair.second.core.tiers
        assert tiers is not None
        for handle in range(MOST_PREFETCHES + 9):
            pair.second.core.prefetch(Prefetch(0, handle, ids, KvSource(reservation, ADDRESS, 10)), pair.second.now)
        assert len(tiers.prefetches) == MOST_PREFETCHES
        pair.second.core.abort_peer(0, pair.second.now)
        assert not len(tiers.prefetches) and not tiers.waiting()


@settings(max_examples=1000 if NIGHTLY else 60, deadline=None)
@given(st.data())
def test_random_prefetches_change_no_output_and_leak_no_page(data: st.DataObject) -> None:
    """Random announcements come late, twice or never.

    Prompts share prefixes, requests are preempted, pools are small, and reservations end early.
    """
    draw = data.draw
    first: dict[str, Any] = {"num_pages": draw(st.sampled_from([14, 20, 40])), "enable_priority_scheduling": True}
    first["disaggregation_hold_s"] = draw(st.sampled_from([0.03, 0.5, 10.0]))
    second: dict[str, Any] = {"num_pages": draw(st.sampled_from([14, 24, 48])), "host_pages": draw(st.sampled_from([0, 40]))}
    second["disaggregation_hold_s"] = draw(st.sampled_from([0.03, 10.0]))
    pair = Relayed(draw(st.sampled_from([0.0, 0.02, 0.3])), first, **second)
    late: list[PagesReady] = []
    gone: set[int] = set()

    def turn() -> None:
        pair.first.turn()
        for ready in pair.first.ready:
            match draw(st.sampled_from(["now", "now", "late", "twice", "never"])):
                case "now":
                    pair.tell(ready)
                case "late":
                    late.append(ready)
                case "twice":
                    pair.tell(ready)
                    late.append(ready)
        pair.first.ready.clear()
        if late and draw(st.booleans()):
            pair.tell(late.pop(0))
        pair.second.turn()
        for handle, finish in pair.first.finishes.items():
            if finish.reason is FinishReason.HANDED_OVER and handle not in pair.second.submitted and handle not in gone:
                pair.go_on(handle, pair.prompts[handle], max_new_tokens=6)

    for handle in range(draw(st.integers(1, 6))):
        head, tail = draw(st.integers(0, 1)), draw(st.integers(0, 9))
        prompt = [head] * draw(st.integers(3, 38)) + [handle] * tail
        pair.begin(handle, prompt, max_new_tokens=6, priority=draw(st.integers(0, 1)))
        for _ in range(draw(st.integers(0, 5))):
            match draw(st.sampled_from(["", "", "", "abort", "leave", "flush", "flush the other"])):
                case "abort":
                    pair.first.abort(victim := draw(st.integers(0, handle)))
                    pair.second.abort(victim)
                    gone.add(victim)
                case "leave" if pair.reports:
                    pair.first.core.release_reservation(pair.release_of(next(reversed(pair.reports.values()))[-1].reservation))
                case "flush":
                    pair.first.control.flush_cache()
                case "flush the other":
                    pair.second.control.flush_cache()
            turn()
    for _ in range(600):
        pair.second.now += 0.1
        turn()
        if pair.first.core.idle and pair.second.core.idle and not late:
            break
    assert set(pair.prompts) <= set(pair.first.finishes) and set(pair.second.submitted) <= set(pair.second.finishes)
    pair.assert_answers_and_ends()
