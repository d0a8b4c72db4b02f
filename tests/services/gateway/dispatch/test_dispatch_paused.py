"""Tests of paused workers: they keep their requests, and new requests wait at the gateway until the pause ends."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.services.gateway.system import RawClient, System, chat_body, wait_until

CHAT = "/v1/chat/completions"


def report_load(system: System, worker: int = 0, **load: Any) -> None:
    servicer = system.workers[worker].servicer
    system.do(lambda: servicer.report_load(**load))
    wait_until(lambda: system.links[worker].load == servicer.load, "the load report")


def test_requests_stay_at_a_paused_worker_and_new_requests_go_to_another_worker() -> None:
    with System(workers=2, routing_policy="round_robin") as system:
        system.allow(0)
        for _ in range(2):
            RawClient(system, CHAT, chat_body())
        wait_until(lambda: system.running() == [1, 1], "a request on each worker")
        report_load(system, 0, paused=True, num_open=1)
        for _ in range(3):
            RawClient(system, CHAT, chat_body())
        wait_until(lambda: system.running() == [1, 4], "the other requests on the second worker")
        assert system.submits() == [1, 4] and system.total("rootstock_gateway_moves_total") == 0


def test_requests_wait_while_all_workers_are_paused() -> None:
    with System() as system, ThreadPoolExecutor() as pool:
        report_load(system, paused=True)
        answers = [pool.submit(system.chat) for _ in range(3)]
        wait_until(lambda: system.num_waiting == 3, "three queued requests")
        assert system.submits() == [0] and system.get("/readiness").json()["missing"] == ["worker"]
        report_load(system, paused=False)
        assert {answer.result(60).status_code for answer in answers} == {200}
        assert system.get("/readiness").status_code == 200


def test_worker_with_an_open_breaker_is_used_while_the_other_worker_is_paused() -> None:
    """Breakers do not count if they would exclude every worker."""
    with System(workers=2) as system:
        link = system.links[1]
        system.do(lambda: [link.breaker.failed(asyncio.get_running_loop().time()) for _ in range(100)])
        report_load(system, 0, paused=True)
        assert [one.address for one in system.gateway.dispatcher.fleet.usable()] == [link.address]
        report_load(system, 0, paused=False)
        system.do(system.gateway.dispatcher._on_tick)
        assert link not in system.gateway.dispatcher.fleet.usable()


def test_error_after_the_queue_timeout_says_that_the_workers_are_paused() -> None:
    with System(queue_timeout_s=0.1) as system:
        report_load(system, paused=True)
        answer = system.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "paused") and "retry-after" in answer.headers
        assert system.metric("rootstock_gateway_refusals_total", reason="paused") == 1


def test_session_turn_waits_while_the_worker_is_paused() -> None:
    with System() as system, ThreadPoolExecutor() as pool:
        report_load(system, paused=True)
        turn = {"text": "Hi", "session_params": {"id": "s"}}
        answer = pool.submit(system.post, "/generate", turn)
        wait_until(lambda: bool(parked(system)), "the parked turn")
        assert system.submits() == [0]
        report_load(system, paused=False)
        assert answer.result(60).status_code == 200


def parked(system: System) -> int:
    return sum(len(pool.parked) for pool in system.gateway.dispatcher.fleet.pools.values())
