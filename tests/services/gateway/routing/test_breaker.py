"""Tests of CircuitBreaker: it opens on faults, allows one probe and does not stay half-open."""

from __future__ import annotations

import pytest

from rootstock_llm.services.gateway.routing.breaker import BreakerConfig, BreakerState, CircuitBreaker

CONFIG = BreakerConfig(
    threshold=3, window_s=10.0, fault_ratio=0.5, min_results=10, cooldown_s=5.0, max_cooldown_s=20.0, probe_s=30.0
)


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(3):
        breaker.failed(now)
    return breaker


def test_breaker_opens_after_the_threshold_of_faults_in_a_row() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(3):
        breaker.failed(0.0)
        breaker.failed(0.0)
        assert breaker.allows(0.0)
        breaker.succeeded(0.0)
    breaker = opened()
    assert breaker.state is BreakerState.OPEN and not breaker.allows(4.9)


@pytest.mark.parametrize(
    ("pattern", "opens"),
    [("sfsfsfsfs", False), ("sfsfsfsfsf", True), ("ssfssfssfssfssfssf", False)],
    ids=["too few results", "half faults", "one third faults"],
)
def test_breaker_opens_at_the_fault_ratio(pattern: str, opens: bool) -> None:
    breaker = CircuitBreaker(CONFIG)
    for result in pattern:
        breaker.succeeded(1.0) if result == "s" else breaker.failed(1.0)
    assert breaker.allows(1.0) is not opens


def test_breaker_ignores_faults_from_before_the_window() -> None:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(8):
        breaker.succeeded(0.0)
    for at in range(4):
        breaker.failed(0.0)
        breaker.succeeded(12.0 + at)
    breaker.failed(16.0)
    assert breaker.allows(16.0)


def test_breaker_allows_one_probe_after_the_cooldown() -> None:
    breaker = opened()
    assert breaker.allows(5.0)
    breaker.begin(5.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(5.0) and not breaker.allows(34.9)
    breaker.begin(20.0)  # another request does not change the deadline of the probe
    assert breaker.allows(35.0)


def test_breaker_does_not_begin_a_probe_when_only_asked_whether_a_request_is_allowed() -> None:
    breaker = opened()
    assert breaker.allows(6.0) and breaker.allows(6.0) and breaker.state is BreakerState.OPEN


def test_breaker_closes_when_a_probe_succeeds() -> None:
    breaker = opened()
    breaker.begin(5.0)
    breaker.succeeded(6.0)
    assert breaker.state is BreakerState.CLOSED and breaker.allows(6.0)
    breaker.failed(6.0)
    breaker.failed(6.0)
    assert breaker.allows(6.0)


def test_breaker_allows_another_probe_when_the_last_probe_has_no_result() -> None:
    breaker = opened()
    now = 5.0
    for _ in range(5):
        assert breaker.allows(now)
        breaker.begin(now)
        assert not breaker.allows(now)
        now += CONFIG.probe_s
    breaker.begin(now)
    breaker.succeeded(now)
    assert breaker.state is BreakerState.CLOSED


def test_cooldown_doubles_after_each_failed_probe_up_to_a_limit_and_success_resets_the_cooldown() -> None:
    breaker, now = opened(), 5.0
    for cooldown in (10.0, 20.0, 20.0):
        breaker.begin(now)
        breaker.failed(now)
        assert not breaker.allows(now + cooldown - 0.1)
        now += cooldown
        assert breaker.allows(now)
    breaker.begin(now)
    breaker.succeeded(now)
    for _ in range(3):
        breaker.failed(now)
    assert not breaker.allows(now + 4.9) and breaker.allows(now + 5.0)


def test_open_breaker_ignores_late_results() -> None:
    breaker = opened()
    breaker.failed(4.0)
    breaker.succeeded(4.0)
    assert breaker.state is BreakerState.OPEN and breaker.allows(5.0)
