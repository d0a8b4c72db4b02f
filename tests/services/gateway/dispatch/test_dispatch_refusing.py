"""Tests of workers with max_queued_requests 0: they get no new request. If all workers of a model refuse, requests get 503."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.dispatch.test_dispatch_paused import report_load
from tests.services.gateway.fakes import MODEL, Refusal
from tests.services.gateway.system import RawClient, System, chat_body, wait_until

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, **chat_body()},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/generate": {"text": "Hi"},
    "/v1/embeddings": {"model": MODEL, "input": "Hi"},
    "/v1/messages": {"model": MODEL, "max_tokens": 4, **chat_body()},
    "/v1/responses": {"model": MODEL, "input": "Hi", "store": False},
}


def code_of(answer: Any) -> str:
    error = answer.json()["error"]
    return str(error.get("code") or error["message"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_gateway_refuses_requests_at_once_when_every_worker_refuses_new_requests(path: str, stream: bool) -> None:
    with System(workers=2, queue_timeout_s=600) as system:
        for worker in range(2):
            report_load(system, worker, refuses_new=True)
        answer = system.post(path, BODIES[path] if path == "/v1/embeddings" else {**BODIES[path], "stream": stream})
        assert answer.status_code in (503, 529) and "retry-after" in answer.headers
        assert "max_queued_requests" in answer.text and system.submits() == [0, 0]
        assert system.metric("rootstock_gateway_refusals_total", reason="queue_full") == 1
        assert system.get("/readiness").status_code == 200, "the gateway stays ready"


def test_error_code_is_queue_full_when_every_worker_refuses_new_requests() -> None:
    with System() as system:
        report_load(system, refuses_new=True)
        assert code_of(system.post("/generate", {"text": "Hi"})) == "queue_full"


def test_new_requests_go_to_the_worker_that_accepts_new_requests() -> None:
    with System(workers=2, routing_policy="round_robin") as system:
        report_load(system, 0, refuses_new=True)
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        assert system.submits() == [0, 4] and system.total("rootstock_gateway_moves_total") == 0


def test_waiting_requests_are_refused_when_the_last_worker_begins_to_refuse() -> None:
    with System() as system, ThreadPoolExecutor() as pool:
        report_load(system, paused=True)
        answers = [pool.submit(system.chat) for _ in range(3)]
        wait_until(lambda: system.num_waiting == 3, "three queued requests")
        report_load(system, paused=True, refuses_new=True)
        assert {code_of(answer.result(60)) for answer in answers} == {"queue_full"}


def test_requests_wait_when_a_paused_worker_accepts_new_requests() -> None:
    with System(workers=2) as system, ThreadPoolExecutor() as pool:
        report_load(system, 0, refuses_new=True)
        report_load(system, 1, paused=True)
        answer = pool.submit(system.chat)
        wait_until(lambda: system.num_waiting == 1, "a queued request")
        report_load(system, 1)
        assert answer.result(60).status_code == 200 and system.submits() == [0, 1]


def test_waiting_request_is_refused_when_a_later_load_report_says_that_the_worker_refuses() -> None:
    """The worker first refuses only this request. Its next load report says that it refuses every new request."""
    with System(queue_timeout_s=600) as system, ThreadPoolExecutor() as pool:
        system.do(lambda: system.worker.refuse.append(Refusal(pb.ERROR_CODE_QUEUE_FULL, "the request queue is full")))
        answer = pool.submit(system.post, "/generate", {"text": "Hi"})
        wait_until(lambda: system.num_waiting == 1, "a request that waits for the next load report")
        report_load(system, refuses_new=True)
        assert code_of(answer.result(60)) == "queue_full"


def test_request_with_output_moves_to_a_worker_that_refuses_new_requests() -> None:
    with System(workers=2, routing_policy="round_robin") as system:
        system.allow(1)
        client = RawClient(system, CHAT, chat_body(stream=True))
        wait_until(lambda: sum(system.running()) == 1, "a request that runs")
        at = system.running().index(1)
        client.read_until(b"data:")
        report_load(system, 1 - at, refuses_new=True)
        system.allow(None)
        system.do(lambda: system.workers[at].servicer.end_running(pb.ERROR_CODE_UNAVAILABLE))
        client.read_until(b"[DONE]")
        assert b'"finish_reason":"' in client.received.replace(b" ", b"") and system.submits()[1 - at] == 1


def test_worker_gets_requests_when_the_load_report_ends_the_refusal() -> None:
    with System() as system:
        report_load(system, refuses_new=True)
        assert system.chat().status_code == 503
        report_load(system)
        assert system.chat().status_code == 200
