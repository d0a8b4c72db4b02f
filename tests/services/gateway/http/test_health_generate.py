"""Tests of /health_generate while workers are busy, hung or paused. The gateway checks busy workers by their load reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.services.gateway.system import RawClient, System, wait_until

GENERATE = "/generate"


def report_load(system: System, worker: int = 0, **load: Any) -> None:
    """Sends a load report of the worker, and waits until the gateway has it."""
    servicer = system.workers[worker].servicer
    system.do(lambda: servicer.report_load(**load))
    wait_until(lambda: system.links[worker].load == servicer.load, "the load report")


PROMPT = {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}


@contextmanager
def busy(**settings: Any) -> Iterator[System]:
    """Yields a system whose worker has one request of this gateway and computes no step, so that it sends no output."""
    with System(**settings) as system:
        system.allow(0)
        RawClient(system, GENERATE, PROMPT)
        wait_until(lambda: system.running()[0] == 1, "the request at the worker")
        yield system


class TestHealthOfABusyFleet:
    def test_health_generate_sends_no_request_to_a_worker_in_a_long_step(self) -> None:
        with busy() as system:
            for age in (2_500, 11_000, 29_000):
                report_load(system, num_open=1, num_running=1, step_age_ms=age, step_limit_ms=30_000)
                assert system.get("/health_generate").status_code == 200
            assert system.submits() == [1]

    def test_health_generate_reports_a_hung_worker_at_once(self) -> None:
        with busy() as system:
            report_load(system, num_open=1, num_running=1, step_age_ms=10_400, step_limit_ms=10_000)
            answer = system.get("/health_generate")
            assert answer.status_code == 503 and "worker-0 hangs" in answer.json()["error"]["message"]
            assert system.submits() == [1]
            report_load(system, num_open=1, num_running=1, step_age_ms=0, step_limit_ms=10_000)
            assert system.get("/health_generate").status_code == 200

    def test_health_generate_requests_a_token_when_a_worker_is_ready(self) -> None:
        with System(workers=2, routing_policy="round_robin") as system:
            report_load(system, 0, num_open=1, num_running=1, step_age_ms=60_000, step_limit_ms=10_000)
            report_load(system, 1, step_limit_ms=10_000)
            for _ in range(3):
                assert system.get("/health_generate").status_code == 200
                system.do(lambda: setattr(system.gateway.dispatcher, "last_step_at", None))
            assert system.submits() == [0, 3]
            assert "rootstock_gateway_time_to_first_token_seconds_count" not in system.get("/metrics").text, (
                "the health check is no client's request"
            )

    def test_health_generate_fails_when_all_workers_are_paused(self) -> None:
        with System() as system:
            report_load(system, paused=True, step_limit_ms=10_000)
            answer = system.get("/health_generate")
            assert answer.status_code == 503 and "worker-0 is paused" in answer.json()["error"]["message"]
