"""Tests of clients that leave in each phase of a request: every service gets an abort, and the gateway frees its resources."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from tests.services.gateway.system import RawClient, System, chat_body, wait_until

CHAT = "/v1/chat/completions"


def idle(system: System) -> bool:
    """Returns whether the gateway has released all requests."""
    gateway = system.gateway
    if any(link.open for link in gateway.dispatcher.fleet.links.values()) or any(link.busy for link in gateway.detoks.links):
        return False
    parked = any(pool.parked for pool in gateway.dispatcher.fleet.pools.values())
    return gateway.service.idle and not parked and system.num_waiting == 0


def has_ended(system: System, phase: str) -> bool:
    """Waits until the metrics count a request that ended in `phase`, and until the gateway is idle."""
    wait_until(lambda: is_counted_and_idle(system, phase), "the end of the request")
    return True


def is_counted_and_idle(system: System, phase: str) -> bool:
    return system.metric("rootstock_gateway_aborts_total", phase=phase) == 1.0 and idle(system)


def test_request_is_released_when_the_client_leaves_while_sending_the_body(system: System) -> None:
    raw = socket.create_connection(("127.0.0.1", system.port))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    wait_until(lambda: not system.gateway.service.idle, "the arrival of the request")
    raw.close()
    assert has_ended(system, "accepted")
    assert system.tokenizer.calls == []


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_is_released_when_the_client_leaves_during_tokenization(system: System, stream: bool) -> None:
    system.do(system.tokenizer.gate.clear)
    client = RawClient(system, CHAT, chat_body(stream=stream))
    wait_until(lambda: len(system.tokenizer.calls) == 1, "the tokenizer's call")
    client.vanish()
    assert has_ended(system, "accepted")
    wait_until(lambda: system.tokenizer.cancelled == 1, "the call's cancellation")
    assert system.worker.submits == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "ab"}),
        ("/v1/messages/count_tokens", {"model": "test-model", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_request_without_generation_is_cancelled_when_the_client_leaves(path: str, body: dict[str, Any]) -> None:
    """The waiting requests have their bytes reserved, and count against max_concurrent_requests."""
    with System(max_concurrent_requests=2, tokenize_timeout_s=600.0) as system:
        system.do(system.tokenizer.gate.clear)
        clients = [RawClient(system, path, {**body, "user": "x" * 100}) for _ in range(2)]
        wait_until(lambda: len(system.tokenizer.calls) == 2, "the tokenizer's calls")
        assert system.metric("rootstock_gateway_body_bytes", pool="small") > 100
        refused = httpx.post(f"http://127.0.0.1:{system.port}{path}", json=body)
        assert refused.status_code in (503, 529) and "retry-after" in refused.headers
        for client in clients:
            client.vanish()
        wait_until(lambda: system.tokenizer.cancelled == 2, "the calls' cancellation")
        wait_until(lambda: system.metric("rootstock_gateway_body_bytes", pool="small") == 0, "the release of the bodies")


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_is_released_when_the_client_leaves_the_queue(system: System, stream: bool) -> None:
    system.call(system.workers[0].stop())
    wait_until(lambda: system.gateway.dispatcher.connected() == 0, "the worker's end")
    client = RawClient(system, CHAT, chat_body(stream=stream, n=2))
    wait_until(lambda: system.total("rootstock_gateway_queue_length") == 2, "2 queued choices")
    client.vanish()
    assert has_ended(system, "tokenized")
    system.call(system.workers[0].start())
    wait_until(lambda: system.gateway.dispatcher.connected() == 1, "the connection of the worker")
    assert system.chat().status_code == 200
    assert len(system.worker.submits) == 1


def test_request_is_released_when_the_client_leaves_while_no_worker_is_connected() -> None:
    with System(down=("worker",)) as system:
        client = RawClient(system, CHAT, chat_body())
        wait_until(lambda: system.total("rootstock_gateway_queue_length") == 1, "the queued request")
        client.vanish()
        assert has_ended(system, "accepted")


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_is_released_when_the_client_leaves_before_the_first_token(system: System, stream: bool) -> None:
    """The body is larger than the server's read-ahead buffer."""
    system.do(lambda: system.worker.allow(0))
    client = RawClient(system, CHAT, chat_body(stream=stream, n=3, user="x" * 300_000))
    wait_until(lambda: len(system.worker.running) == 3, "the submits")
    client.vanish()
    assert has_ended(system, "submitted")
    wait_until(lambda: not system.worker.running, "the aborts")
    assert sorted(system.worker.aborted) == sorted(submit.handle for submit in system.worker.submits)
    assert system.detokenizer.batches == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_is_released_when_the_client_leaves_during_decoding(system: System, stream: bool) -> None:
    system.do(lambda: system.worker.allow(4))
    client = RawClient(system, CHAT, chat_body(stream=stream, n=2))
    if stream:
        client.read_until(b'l"}')  # the end of an event, which has more letters if the detokenizer was late
        wait_until(lambda: len(system.detokenizer.open) == 2, "both choices at the detokenizer")
    wait_until(lambda: system.has_tokens(4), "four tokens of each choice")
    client.vanish()
    assert has_ended(system, "streaming")
    wait_until(lambda: not system.worker.running and not system.detokenizer.open, "the aborts")
    assert len(system.worker.aborted) == 2


def test_request_is_released_when_the_client_leaves_during_an_echo(system: System) -> None:
    system.do(system.detokenizer.gate.clear)
    client = RawClient(system, "/v1/completions", {"prompt": [65, 66], "echo": True})
    wait_until(lambda: len(system.detokenizer.batches) == 1, "the batch at the detokenizer")
    client.vanish()
    assert has_ended(system, "accepted")
    system.do(system.detokenizer.gate.set)
    assert system.worker.submits == []


def test_aborts_of_all_choices_of_a_request_share_a_message(system: System) -> None:
    system.do(lambda: system.worker.allow(0))
    client = RawClient(system, CHAT, chat_body(n=8))
    wait_until(lambda: len(system.worker.running) == 8, "the submits")
    client.vanish()
    wait_until(lambda: not system.worker.running, "the aborts")
    assert [(len(m.submits), len(m.aborts)) for m in system.worker.messages] == [(8, 0), (0, 8)]


def test_other_requests_continue_when_a_client_leaves(system: System) -> None:
    system.do(lambda: system.worker.allow(0))
    leaving, staying = (RawClient(system, CHAT, chat_body(stream=True)) for _ in range(2))
    wait_until(lambda: len(system.worker.running) == 2, "the submits")
    system.do(lambda: system.worker.allow(2))
    for client in (leaving, staying):
        client.read_until(b'"role":"assistant"')
    leaving.vanish()
    wait_until(lambda: len(system.worker.running) == 1, "the abort")
    system.do(lambda: system.worker.allow(None))
    staying.read_until(b"data: [DONE]")
    assert b'"finish_reason":"stop"' in staying.received
    wait_until(lambda: idle(system), "the end of the request")
