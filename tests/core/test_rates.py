"""Estimated times of reading and of computing KV: assumed before the first measurement, then measured."""

from __future__ import annotations

import pytest

from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.core.tiers.rates import (
    FADES,
    FIRST_BYTES_S,
    FORGIVES,
    LARGE_TOKENS,
    LATENCY_S,
    MOST_LANES,
    UNKNOWN_S,
    Rates,
)

PAGE_BYTES, PAGE_SIZE = 1 << 20, 16


def rates(token_s: float = 0.0) -> Rates:
    """Returns rates at which computing a token takes `token_s` seconds; 0: no step was measured."""
    made = Rates(PAGE_BYTES, PAGE_SIZE)
    made.computed(1000, 0, 1000 * token_s)
    return made


def bytes_s(known: Rates, tier: Tier) -> float:
    return PAGE_BYTES / (known.reading_s(tier, 1) - LATENCY_S[tier])


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.STORAGE])
@pytest.mark.parametrize("pages", [1, 10_000])
def test_rates_prefer_reading_when_computing_is_not_measured(tier: Tier, pages: int) -> None:
    assert rates().computing_s(pages) == UNKNOWN_S
    assert rates().reading_pays(tier, pages)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(
    ("tier", "token_s", "pages", "pays"),
    [
        (Tier.HOST, 1e-4, 1, True),  # 1.26 ms to read, 1.6 ms to compute
        (Tier.HOST, 1e-4, 100, True),  # 27 ms, 160 ms
        (Tier.HOST, 1e-5, 1, False),  # 1.26 ms, 0.16 ms
        (Tier.HOST, 1e-5, 100, False),  # 27 ms, 16 ms
        (Tier.HOST, 3e-5, 1, False),  # 1.26 ms, 0.48 ms: the latency is longer than the computation
        (Tier.HOST, 3e-5, 100, True),  # 27 ms, 48 ms
        (Tier.STORAGE, 1e-4, 1, False),  # 6 ms, 1.6 ms
        (Tier.STORAGE, 1e-4, 100, True),  # 110 ms, 160 ms
        (Tier.STORAGE, 3e-5, 100, False),  # 110 ms, 48 ms
    ],
)
def test_rates_prefer_the_faster_of_reading_and_computing(tier: Tier, token_s: float, pages: int, pays: bool) -> None:
    assert rates(token_s).reading_pays(tier, pages) is pays


def test_reading_time_is_the_sum_of_latency_and_transfer_time() -> None:
    for tier in (Tier.HOST, Tier.STORAGE):
        assert rates().reading_s(tier, 8) == LATENCY_S[tier] + 8 * PAGE_BYTES / FIRST_BYTES_S[tier]
    assert rates(1e-3).computing_s(8) == pytest.approx(8 * PAGE_SIZE * 1e-3)


def test_computing_time_is_a_moving_average() -> None:
    known = rates(1e-3)
    known.computed(200, 0, 200 * 2e-3)
    assert known.computing_s(1) == pytest.approx(PAGE_SIZE * (FADES * 1e-3 + (1 - FADES) * 2e-3))


@pytest.mark.parametrize(
    ("tokens", "rows", "seconds"), [(LARGE_TOKENS - 1, 0, 1.0), (1000, 1, 2.0), (0, 0, 1.0), (1000, 0, 0.0), (1000, 0, -1.0)]
)
def test_rates_ignore_small_and_mixed_and_untimed_steps(tokens: int, rows: int, seconds: float) -> None:
    """The time of a small step is mainly the constant time of a step. A part of a mixed step's time is spent on decode rows."""
    known = rates(1e-3)
    known.computed(tokens, rows, seconds)
    assert known.computing_s(1) == pytest.approx(PAGE_SIZE * 1e-3)


def test_rates_measure_a_large_extend_step() -> None:
    known = rates()
    known.computed(LARGE_TOKENS, 0, LARGE_TOKENS * 0.03)
    assert known.computing_s(2) == pytest.approx(2 * PAGE_SIZE * 0.03)


def test_rates_measure_each_tier_separately() -> None:
    known = rates()
    known.moved(Tier.HOST, 10, 1.0)
    assert bytes_s(known, Tier.HOST) == pytest.approx(FADES * FIRST_BYTES_S[Tier.HOST] + (1 - FADES) * 10 * PAGE_BYTES)
    assert bytes_s(known, Tier.STORAGE) == pytest.approx(FIRST_BYTES_S[Tier.STORAGE])


@pytest.mark.parametrize(("pages", "seconds"), [(0, 1.0), (10, 0.0), (10, -1.0)])
def test_rates_ignore_reads_without_pages_or_time(pages: int, seconds: float) -> None:
    known = rates()
    known.moved(Tier.HOST, pages, seconds)
    assert bytes_s(known, Tier.HOST) == pytest.approx(FIRST_BYTES_S[Tier.HOST])


def test_rates_report_the_share_of_computing_time_that_a_read_saves() -> None:
    """Reading 100 pages takes 27 ms from the host and 110 ms from the storage. Computing takes 160 or 16 ms."""
    assert rates().saves(Tier.HOST, 100) is None and rates().saves(Tier.STORAGE, 100) is None
    known = rates(1e-4)  # 160 ms
    for tier in (Tier.HOST, Tier.STORAGE):
        assert known.saves(tier, 100) == pytest.approx(1 - known.reading_s(tier, 100) / 0.16)
    host, storage = known.saves(Tier.HOST, 100), known.saves(Tier.STORAGE, 100)
    assert host is not None and storage is not None and 0 < storage < host < 1
    assert known.saves(Tier.HOST, 1) < host, "the latency reduces the saved share of a short read"  # type: ignore[operator]
    assert rates(1e-5).saves(Tier.HOST, 100) == rates(1e-5).saves(Tier.STORAGE, 100) == 0.0
    before = known.bytes_s(Tier.STORAGE)
    known.saves(Tier.STORAGE, 1)
    assert known.bytes_s(Tier.STORAGE) == before, "a report of the saved share is no refused read and leaves the rate unchanged"


def test_rates_rise_with_each_refused_read() -> None:
    known = rates(1e-5)
    refusals = 0
    while not known.reading_pays(Tier.HOST, 100):
        refusals += 1
        assert refusals < 100
    assert refusals > 1
    before = bytes_s(known, Tier.HOST)
    assert known.reading_pays(Tier.HOST, 100) and bytes_s(known, Tier.HOST) == pytest.approx(before)


def test_rates_give_up_a_read_when_computing_is_faster() -> None:
    known = rates(1e-4)  # 100 pages: 27 ms to read, 160 ms to compute
    assert [known.is_over(Tier.HOST, 100, elapsed, 0) for elapsed in (0.0, 0.02, 0.1, 0.159)] == [False] * 4
    assert known.is_over(Tier.HOST, 100, 0.161, 0)


def test_rates_give_up_a_read_immediately_when_the_whole_read_is_slower_than_computing() -> None:
    """Reading 100 pages takes 27 ms, and computing them takes 16 ms.

    A read that is almost complete continues.
    """
    known = rates(1e-5)
    assert known.is_over(Tier.HOST, 100, 0.0, 0) and not known.is_over(Tier.HOST, 100, 0.02, 0)


def test_rates_give_up_a_read_after_a_second_when_computing_is_not_measured() -> None:
    assert not rates().is_over(Tier.HOST, 10, UNKNOWN_S, 0)
    assert rates().is_over(Tier.HOST, 10, UNKNOWN_S + 0.01, 0)


def test_rates_fall_after_an_abandoned_read() -> None:
    known = rates()
    known.given_up(Tier.HOST, 10, 2.0)
    assert bytes_s(known, Tier.HOST) == pytest.approx(5 * PAGE_BYTES)
    known.given_up(Tier.HOST, 10, 0.001)
    known.given_up(Tier.HOST, 10, 0.0)
    assert bytes_s(known, Tier.HOST) == pytest.approx(5 * PAGE_BYTES)


def test_late_read_continues_when_reading_all_following_pages_is_faster_than_computing() -> None:
    """The read of 10 pages is late. It continues because the next 1,000 pages take 0.26 s to read and 1.6 s to compute."""
    known = rates(1e-4)
    assert known.is_over(Tier.HOST, 10, 0.1, 0) and not known.is_over(Tier.HOST, 10, 0.1, 1000)


def test_slow_remote_worker_does_not_change_the_rates_of_other_workers() -> None:
    """The slow worker's rate stays low when its late reads complete."""
    known = rates(1e-4)
    known.moved(Tier.PEER, 1, 1e-4, "another")
    known.given_up(Tier.PEER, 1, 10.0, "one")
    for _ in range(32):
        known.moved(Tier.PEER, 1, 10.0, "one")
    assert not known.reading_pays(Tier.PEER, 100, "one") and known.is_over(Tier.PEER, 100, 0.01, 0, "one")
    for lane in ("another", "one that was never read"):
        assert known.reading_pays(Tier.PEER, 100, lane) and not known.is_over(Tier.PEER, 100, 0.0, 0, lane)
    assert not known.loses(Tier.PEER, 100)
    known.given_up(Tier.PEER, 1, 10.0, "another")
    assert known.loses(Tier.PEER, 100), "no known worker is fast enough"


def test_rates_of_a_remote_worker_rise_with_each_refused_read() -> None:
    known = rates(1e-4)
    for lane in ("one", "another"):
        known.given_up(Tier.PEER, 1, 10.0, lane)
    before = known.bytes_s(Tier.PEER, "another")
    assert not known.reading_pays(Tier.PEER, 100, "one")
    assert known.bytes_s(Tier.PEER, "one") == pytest.approx(before * FORGIVES) and known.bytes_s(Tier.PEER, "another") == before


def test_rates_of_a_remote_worker_follow_recent_reads() -> None:
    known = rates(1e-4)
    known.given_up(Tier.PEER, 1, 10.0, "one")
    known.moved(Tier.PEER, 1, 1e-3, "one")
    assert known.bytes_s(Tier.PEER, "one") == pytest.approx(FADES * PAGE_BYTES / 10 + (1 - FADES) * PAGE_BYTES / 1e-3)
    known.given_up(Tier.PEER, 1, 1e-6, "one")
    assert known.bytes_s(Tier.PEER, "one") < PAGE_BYTES / 1e-3, "a read that is given up early does not change the rate"


def test_rates_forget_remote_workers_beyond_the_limit() -> None:
    known = rates(1e-4)
    known.given_up(Tier.PEER, 1, 10.0, "worker 0")
    for number in range(1, MOST_LANES + 1):
        known.moved(Tier.PEER, 1, 1e-4, f"worker {number}")
    assert known.reading_pays(Tier.PEER, 100, "worker 0")
