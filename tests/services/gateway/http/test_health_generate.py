"""/health_generate while workers are busy, hung or paused. The gateway judges them by their load reports if they are busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.services.gateway.system import RawClient, System, wait_until

GENERATE = "/generate"


def tell(system: System, worker: int = 0, **load: Any) -> None:
    """Sends a load report of the worker, and waits until the gateway has it."""
    told = system.workers[worker].servicer
    system.do(lambda: told.tell(**load))
    wait_until(lambda: system.links[worker].load == told.load, "the load")


PROMPT = {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}


@contextmanager
def busy(**settings: Any) -> Iterator[System]:
    """A worker within a long step of another gateway's request, which has sent nothing to this gateway lately."""
    with System(**settings) as system:
        system.allow(0)
        RawClient(system, GENERATE, PROMPT)
        wait_until(lambda: system.running()[0] == 1, "the request at the worker")
        yield system


class TestHealthOfABusyFleet:
    def test_health_generate_asks_no_token_of_a_worker_in_a_long_step(self) -> None:
        with busy() as system:
            for age in (2_500, 11_000, 29_000):
                tell(system, num_open=1, num_running=1, step_age_ms=age, step_limit_ms=30_000)
                assert system.get("/health_generate").status_code == 200
            assert system.submits() == [1]

    def test_health_generate_reports_a_hung_worker_at_once(self) -> None:
        with busy() as system:
            tell(system, num_open=1, num_running=1, step_age_ms=10_400, step_limit_ms=10_000)
            answer = system.get("/health_generate")
            assert answer.status_code == 503 and "worker-0 hangs" in answer.json()["error"]["message"]
            assert system.submits() == [1]
            tell(system, num_open=1, num_running=1, step_age_ms=0, step_limit_ms=10_000)
            assert system.get("/health_generate").status_code == 200

    def test_health_generate_asks_a_token_of_a_ready_worker(self) -> None:
        with System(workers=2, routing_policy="round_robin") as system:
            tell(system, 0, num_open=1, num_running=1, step_age_ms=60_000, step_limit_ms=10_000)
            tell(system, 1, step_limit_ms=10_000)
            for _ in range(3):
                assert system.get("/health_generate").status_code == 200
                system.do(lambda: setattr(system.gateway.dispatcher, "last_step_at", None))
            assert system.submits() == [0, 3]
            assert "rootstock_gateway_time_to_first_token_seconds_count" not in system.get("/metrics").text, "nobody's request"

    def test_health_generate_fails_when_all_workers_are_paused(self) -> None:
        with System() as system:
            tell(system, paused=True, step_limit_ms=10_000)
            answer = system.get("/health_generate")
            assert answer.status_code == 503 and "worker-0 is paused" in answer.json()["error"]["message"]
