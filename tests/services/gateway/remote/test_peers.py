"""Tests of aborts at all gateways, which share no state: by rid for clients, of all requests for operators."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from rootstock_llm.protos import gateway_pb2 as pb
from rootstock_llm.protos import gateway_pb2_grpc
from rootstock_llm.services.gateway.admin import gateways as peers
from rootstock_llm.services.gateway.admin.gateways import Tenants
from rootstock_llm.services.gateway.generation.abort import AbortReport, AbortScope
from rootstock_llm.services.gateway.keys.key_table import ApiKey, KeyTable
from rootstock_llm.services.shared.rpc import grpc_server
from tests.services.gateway.fakes import FakeWorker
from tests.services.gateway.system import System, wait_until

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
KEYS = {"keys": ("alice", "bob")}
GENERATE = "/generate"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def begin(
    pool: ThreadPoolExecutor, system: System, gateway: int, rid: str, headers: dict[str, str] | None = None, **body: Any
) -> Future[httpx.Response]:
    return pool.submit(system.post, GENERATE, {"text": "Hi", "rid": rid, **body}, gateway, headers=headers)


def abort(system: System, rid: str, gateway: int = 0, headers: dict[str, str] | None = None) -> dict[str, int]:
    answer = system.post("/abort_request", {"rid": rid}, gateway, headers=headers)
    assert answer.status_code == 200, answer.text
    report: dict[str, int] = answer.json()
    return report


def reason(answer: Future[httpx.Response]) -> str:
    response = answer.result(60)
    if response.status_code != 200:
        return str(response.json()["error"]["code"])
    return str(response.json()["meta_info"]["finish_reason"]["type"])


def test_abort_ends_requests_of_the_same_api_key_at_all_gateways(pool: ThreadPoolExecutor) -> None:
    with System(gateways=2, **KEYS) as system:
        system.allow(0)
        alices, bobs = begin(pool, system, 1, "r", ALICE), begin(pool, system, 1, "r", BOB)
        wait_until(lambda: num_submits(system) == 2, "both requests at the worker")
        assert abort(system, "r", 0, ALICE) == {"aborted": 1, "gateways": 2, "unreached": 0}
        assert reason(alices) == "abort" and not bobs.done()
        assert abort(system, "r", 0, ALICE)["aborted"] == 0
        system.allow(None)
        assert reason(bobs) == "stop"


def test_abort_ends_requests_in_every_phase(pool: ThreadPoolExecutor) -> None:
    """The phases: tokenization, in the gateway's queue, running, and in the queue again after the loss of the worker."""

    def small(workers: list[FakeWorker]) -> None:
        workers[0].info.max_running_requests = 1

    with System(gateways=2, configure=small, worker_queue_slack=0.0) as system:
        system.allow(2)
        running = [begin(pool, system, 1, "running", sampling_params={"max_new_tokens": 9}) for _ in range(3)]
        second = system.gateways[1].dispatcher
        wait_until(lambda: num_submits(system) == 3 and system.worker.steps_left == 0, "three running requests")
        queued = begin(pool, system, 1, "queued")
        wait_until(lambda: sum(second.waiting_by_model().values()) == 1, "a queued request")
        system.do(system.tokenizer.gate.clear)
        tokenized = begin(pool, system, 1, "tokenized")
        wait_until(lambda: len(system.tokenizer.calls) == 5, "a request at the tokenizer")
        assert abort(system, "tokenized")["aborted"] == 1 and reason(tokenized) == "aborted"
        assert abort(system, "queued")["aborted"] == 1 and reason(queued) == "abort"
        system.call(system.workers[0].stop())
        wait_until(lambda: sum(second.waiting_by_model().values()) == 3, "queued requests of the lost worker")
        assert abort(system, "running")["aborted"] == 3 and {reason(answer) for answer in running} == {"abort"}


def port(listener: socket.socket) -> int:
    number: int = listener.getsockname()[1]
    return number


def num_submits(system: System) -> int:
    return sum(system.submits())


def operate(system: System, **scope: Any) -> AbortReport:
    return system.call(system.gateways[0].aborter.abort(AbortScope(**{"rid": None, "key": None, **scope})))


def test_abort_by_an_operator_ends_requests_of_all_api_keys(pool: ThreadPoolExecutor) -> None:
    with System(gateways=2, workers=2, routing_policy="round_robin", **KEYS) as system:
        system.allow(0)
        answers = [begin(pool, system, at % 2, f"r{at}", ALICE if at < 2 else BOB) for at in range(4)]
        wait_until(lambda: num_submits(system) == 4, "all requests at the workers")
        first, second = system.submits()
        assert first and second
        assert operate(system, worker="worker-1").aborted == second
        report = operate(system)
        assert report.aborted == first and not report.unreached
        assert {reason(answer) for answer in answers} == {"abort"}


def test_abort_returns_when_other_gateways_are_down_or_hang(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CALL_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as hanging, System(peers=f"127.0.0.1:1,127.0.0.1:{port(hanging)}") as system:
        system.allow(0)
        answer = begin(pool, system, 0, "r")
        wait_until(lambda: num_submits(system) == 1, "the request at the worker")
        assert abort(system, "r") == {"aborted": 1, "gateways": 1, "unreached": 2}
        assert reason(answer) == "abort"


def call(system: System, request: pb.AbortRequest, token: str = "") -> pb.AbortResponse | grpc.StatusCode:
    """Calls Abort at the peer port of one of the gateways."""
    address = sorted(system.gateways[0]._peers._channels)

    async def ask() -> pb.AbortResponse | grpc.StatusCode:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        async with grpc_server.channel(address[0]) as channel:
            try:
                return await gateway_pb2_grpc.GatewayPeerStub(channel).Abort(request, timeout=5, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return error.code()

    return system.call(ask())


def test_port_for_other_gateways_refuses_invalid_abort_requests() -> None:
    refused = (
        pb.AbortRequest(rid="r"),
        pb.AbortRequest(operator=True),
        pb.AbortRequest(all=True, tenant=b"t"),
        pb.AbortRequest(rid="r", operator=False),
        pb.AbortRequest(rid="r" * 1000, tenant=b""),
    )
    with System(gateways=2) as system:
        assert {call(system, request) for request in refused} == {grpc.StatusCode.INVALID_ARGUMENT}
        assert call(system, pb.AbortRequest(rid="r", tenant=b"stranger")).aborted == 0
    with System(gateways=2, control_token="t") as system:
        assert call(system, pb.AbortRequest(rid="r", tenant=b"")) is grpc.StatusCode.UNAUTHENTICATED
        assert call(system, pb.AbortRequest(rid="r", tenant=b""), "t").gateway
        assert not operate(system).unreached
    with System(gateways=2, peer_host="0.0.0.0") as system:
        assert call(system, pb.AbortRequest(rid="r", tenant=b"")).gateway
        assert call(system, pb.AbortRequest(all=True, operator=True)) is grpc.StatusCode.PERMISSION_DENIED
        assert "PERMISSION_DENIED" in operate(system).unreached[0].message


def tenants(token: str, *names: str) -> Tenants:
    table = KeyTable(ApiKey(name, ()) for name in names) if names else None
    return Tenants(lambda: table, token)


def test_digest_of_an_api_key_name_is_the_same_at_all_gateways() -> None:
    here, there = tenants("token", "alice", "bob"), tenants("token", "bob", "carol", "alice")
    assert there.key(here.digest("alice")) == "alice" and there.key(here.digest("bob")) == "bob"
    assert b"alice" not in here.digest("alice")
    assert tenants("another", "alice").key(here.digest("alice")) is None
    assert here.key(there.digest("carol")) is None
    assert tenants("").key(tenants("").digest("")) == ""
