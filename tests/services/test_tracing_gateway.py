"""Tests of the gateway's spans for one request: server, tokenize, queue and attempt."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.services.collector import CALLER, SAMPLED, TRACE, UNSAMPLED, Collector
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import RawClient, System, wait_until

ANSWER = "Hello, world!"
SERVER = "POST /v1/chat/completions"
TRACED = {"traceparent": SAMPLED}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def chat(system: System, headers: dict[str, str] | None = None, **body: Any) -> Any:
    content = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **body}
    return system.post("/v1/chat/completions", content, headers=headers or {})


def in_background(system: System, headers: dict[str, str], **body: Any) -> threading.Thread:
    thread = threading.Thread(target=chat, args=(system, headers), kwargs=body)
    thread.start()
    return thread


def test_request_is_one_trace_and_the_context_reaches_all_services(collector: Collector) -> None:
    with System(otlp_endpoint=collector.address) as system:
        answer = chat(system, {**TRACED, "x-request-id": "mine"}, n=2)
        assert answer.headers["x-request-id"] == "mine"
        (server,) = collector.wait_for(SERVER)
        (tokenize,), attempts = collector.wait_for("tokenize"), collector.wait_for("attempt", 2)
        encode, submits, opens = system.tokenizer.calls[0], system.worker.submits, system.detokenizer.batches[0].opens
    assert (server.service, server.trace, server.parent, server.failed) == ("rootstock-gateway", TRACE, CALLER, False)
    attributes = server.attributes
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == "/v1/chat/completions"
    assert attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert attributes["rootstock.request_id"] == "mine"
    assert tokenize.parent == server.id and encode.traceparent == f"00-{TRACE}-{tokenize.id}-01"
    assert {one.parent for one in attempts} == {server.id}
    assert sorted(s.traceparent for s in submits) == sorted(f"00-{TRACE}-{one.id}-01" for one in attempts)
    assert {o.traceparent for o in opens} == {f"00-{TRACE}-{server.id}-01"}
    assert {one.attributes["rootstock.ended_by"] for one in attempts} == {"finish"}
    assert {one.attributes["rootstock.worker"] for one in attempts} == {"worker-0"}
    assert all(one.within(server) for one in (tokenize, *attempts))
    assert not collector.named("queue"), "the request did not wait"


@pytest.mark.by_day(one_in=2, seed=26)
@pytest.mark.parametrize(
    ("path", "body", "calls"),
    [
        ("/v1/completions", {"prompt": "Hi"}, 1),
        ("/v1/completions", {"prompt": [72, 105]}, 0),
        ("/v1/embeddings", {"input": "Hi"}, 1),
        ("/generate", {"text": "Hi"}, 1),
        ("/encode", {"text": "Hi"}, 1),
    ],
    ids=["completions", "token ids", "embeddings", "generate", "encode"],
)
def test_every_generation_route_is_traced(collector: Collector, path: str, body: dict[str, Any], calls: int) -> None:
    with System(otlp_endpoint=collector.address) as system:
        assert system.post(path, {"model": MODEL, **body}, headers=TRACED).status_code == 200
        (server,) = collector.wait_for(f"POST {path}")
        (attempt,) = collector.wait_for("attempt")
    assert (server.attributes["http.response.status_code"], attempt.parent) == (200, server.id)
    assert len(collector.named("tokenize")) == calls


def test_unsampled_request_has_no_spans_and_no_context(collector: Collector) -> None:
    with System(otlp_endpoint=collector.address, trace_sample_ratio=0.0) as system:
        for headers in ({}, {"traceparent": UNSAMPLED}):
            assert chat(system, headers).status_code == 200
        sent = [system.tokenizer.calls[-1], system.worker.submits[-1], system.detokenizer.batches[0].opens[0]]
        assert [message.traceparent for message in sent] == ["", "", ""]
        assert chat(system, TRACED).status_code == 200
        (server,) = collector.wait_for(SERVER)
        assert server.trace == TRACE


def test_context_is_not_forwarded_when_tracing_is_off(system_off: System) -> None:
    assert chat(system_off, TRACED).status_code == 200
    assert system_off.worker.submits[-1].traceparent == ""


@pytest.fixture
def system_off() -> Iterator[System]:
    with System() as running:
        yield running


def test_wait_in_the_queue_has_a_separate_span(collector: Collector) -> None:
    with System(otlp_endpoint=collector.address) as system:
        system.call(system.workers[0].stop())
        wait_until(lambda: system.gateway.dispatcher.connected() == 0, "the disconnection")
        waiting = in_background(system, TRACED)
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        system.call(system.workers[0].start())
        waiting.join(60)
        (server,) = collector.wait_for(SERVER)
        (queue,), (attempt,) = collector.wait_for("queue"), collector.wait_for("attempt")
    assert (queue.parent, attempt.parent) == (server.id, server.id)
    assert queue.attributes["rootstock.moved"] is False
    assert queue.within(server)
    assert queue.span.end_time_unix_nano > queue.span.start_time_unix_nano


def test_resumed_request_has_two_attempts_when_a_worker_is_lost(collector: Collector) -> None:
    with System(workers=2, otlp_endpoint=collector.address) as system:
        for host in system.workers:
            system.do(lambda host=host: host.servicer.allow(5))  # type: ignore[misc]
        waiting = in_background(system, TRACED)
        wait_until(lambda: system.has_tokens(5), "five tokens")
        first = next(host for host in system.workers if host.servicer.steps_left == 0)
        for host in system.workers:
            system.do(lambda host=host: host.servicer.allow(None if host is not first else 0))  # type: ignore[misc]
        system.call(first.stop())
        waiting.join(60)
        (server,) = collector.wait_for(SERVER)
        lost, second = collector.wait_for("attempt", 2)
    assert (lost.failed, lost.attributes["rootstock.ended_by"]) == (True, "lost")
    assert (second.failed, second.attributes["rootstock.ended_by"]) == (False, "finish")
    assert lost.attributes["rootstock.worker"] != second.attributes["rootstock.worker"]
    assert (lost.attributes["rootstock.resumed_tokens"], second.attributes["rootstock.resumed_tokens"]) == (0, 5)
    assert (server.failed, server.attributes["http.response.status_code"]) == (False, 200)


def test_attempt_span_is_not_failed_when_the_worker_drains(collector: Collector) -> None:
    with System(workers=2, otlp_endpoint=collector.address) as system:
        system.do(lambda: system.worker.refuse.append((pb.ERROR_CODE_UNAVAILABLE, "going away")))
        for _ in range(4):
            assert chat(system, TRACED).status_code == 200
        tries = collector.wait_for("attempt", 5)
    ends = [one.attributes["rootstock.ended_by"] for one in tries]
    assert (ends.count("drain"), ends.count("finish")) == (1, 4)
    assert not any(one.failed for one in tries)


def test_hedged_request_has_a_second_attempt_and_the_slower_attempt_is_aborted(collector: Collector) -> None:
    with System(workers=2, hedge_after_s=0.05, otlp_endpoint=collector.address) as system:
        for host in system.workers:
            system.do(lambda host=host: host.servicer.allow(0))  # type: ignore[misc]
        waiting = in_background(system, TRACED)
        wait_until(lambda: all(host.servicer.submits for host in system.workers), "the hedge copy")
        system.do(lambda: system.workers[1].servicer.allow(None))
        waiting.join(60)
        tries = collector.wait_for("attempt", 2)
        contexts = {host.servicer.submits[0].traceparent for host in system.workers}
    assert sorted(one.attributes["rootstock.ended_by"] for one in tries) == ["abort", "finish"]
    assert tries[1].attributes["rootstock.routing.reason"] == "hedge"
    assert contexts == {f"00-{TRACE}-{one.id}-01" for one in tries}


def test_spans_of_server_errors_are_failed_and_spans_of_client_errors_are_not(collector: Collector) -> None:
    with System(otlp_endpoint=collector.address) as system:
        assert chat(system, TRACED, temperature=-1).status_code == 400
        (bad,) = collector.wait_for(SERVER)
        assert (bad.failed, bad.attributes["http.response.status_code"]) == (False, 400)
        assert bad.attributes["error.type"] == "invalid_value"
        system.do(lambda: system.worker.refuse.append((pb.ERROR_CODE_INTERNAL, "broken")))
        status = chat(system, TRACED).status_code
        assert status >= 500
        failed = collector.wait_for(SERVER, 2)[1]
        (attempt,) = collector.wait_for("attempt")
        assert (failed.failed, failed.attributes["http.response.status_code"]) == (True, status)
        assert (attempt.failed, attempt.attributes["error.type"]) == (True, "ERROR_CODE_INTERNAL")


def test_spans_end_when_the_client_disconnects(collector: Collector) -> None:
    with System(otlp_endpoint=collector.address) as system:
        system.do(lambda: system.worker.allow(2))
        client = RawClient(system, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True})
        client.read_until(b"data: ")
        client.vanish()
        (server,) = collector.wait_for(SERVER)
        (attempt,) = collector.wait_for("attempt")
    assert server.attributes["error.type"] == "client_gone"
    assert attempt.attributes["rootstock.ended_by"] == "abort"
    assert attempt.parent == server.id


def test_health_probe_has_no_span(collector: Collector) -> None:
    with System(otlp_endpoint=collector.address) as system:
        assert system.get("/health_generate").status_code == 200
        assert chat(system, TRACED).status_code == 200
        collector.wait_for(SERVER)
    assert not collector.named("POST /health_generate")


def test_requests_succeed_when_the_collector_is_unreachable() -> None:
    with System(otlp_endpoint="127.0.0.1:1") as system:
        assert [chat(system, TRACED).status_code for _ in range(5)] == [200] * 5


def test_access_log_has_the_trace_id_of_a_traced_request(collector: Collector, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    with System(otlp_endpoint=collector.address, access_log_file=str(path)) as system:
        assert chat(system, {**TRACED, "x-request-id": "mine"}).status_code == 200
    (answered,) = map(json.loads, path.read_text().splitlines())
    assert (answered["request_id"], answered["trace_id"]) == ("mine", TRACE)
