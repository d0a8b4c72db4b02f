"""Tests of the metric that counts requests refused for lack of a worker, by reason. The count of every reason starts at 0."""

from __future__ import annotations

from tests.services.gateway.dispatch.test_dispatch_queue import fill_workers, send, with_one_slot
from tests.services.gateway.system import System

REFUSALS = "rootstock_gateway_refusals_total"


def test_metric_counts_each_refusal_once_with_the_reason() -> None:
    with System(configure=with_one_slot, max_waiting_requests=1, queue_timeout_s=1.0) as system:
        assert [system.metric(REFUSALS, reason=reason) for reason in ("queue_full", "queue_timeout", "no_worker")] == [0, 0, 0]
        fill_workers(system)
        waiting = send(system, "waits")
        assert system.complete().json()["error"]["code"] == "queue_full"
        waiting.read_until(b"queue_timeout")
        assert [system.metric(REFUSALS, reason=reason) for reason in ("queue_full", "queue_timeout", "no_worker")] == [1, 1, 0]


def test_metrics_have_the_grace_period() -> None:
    with System(grace_s=7.5) as system:
        assert system.metric("rootstock_gateway_grace_period_seconds") == 7.5
