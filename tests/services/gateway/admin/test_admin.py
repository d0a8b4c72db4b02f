"""Tests of the admin API over real sockets, with fake control services."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import orjson
import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.protos import control_pb2_grpc
from rootstock_llm.services.gateway.admin.operations import CONTROL, ROUTES
from rootstock_llm.services.gateway.admin.routes import admin_listener
from rootstock_llm.services.gateway.admin.workers import WorkerDirectory
from rootstock_llm.services.gateway.api.request_body import joined_salt
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.gateway import Gateway
from rootstock_llm.services.gateway.generation.abort import Aborter, AbortScope, PeerAnswer
from rootstock_llm.services.gateway.generation.bodies import BodyBudget
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.http import http_server
from rootstock_llm.services.gateway.observe.access_log import AccessLog
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.remote.worker_link import WorkerLink
from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.control_values import put_values
from rootstock_llm.services.shared.rpc.control_token import read_token
from tests.services.gateway.gateway_process import Process
from tests.services.gateway.system import System

TOKEN = "an operators' token"
STATE = pb.InternalState(worker_id="w", released=[pb.MEMORY_TAG_KV_CACHE])
put_values(STATE.tunables, {"policy": "lpm", "chunk": 1 << 40})
CHANGE = pb.SetInternalStateRequest()
put_values(CHANGE.tunables, {"policy": "lpm", "chunk": 64, "ratio": 0.5, "mixed": True})
ANSWERS: dict[str, Message] = {
    "FlushCache": pb.FlushCacheResponse(pages=12),
    "GetInternalState": STATE,
    "SetInternalState": STATE,
    "SlowDown": pb.SlowDownResponse(),
    "Pause": pb.PauseResponse(),
    "Continue": pb.ContinueResponse(),
    "StartProfile": pb.StartProfileResponse(path="/x"),
    "StopProfile": pb.StopProfileResponse(path="/x"),
    "StartExpertDistributionRecord": pb.StartExpertDistributionRecordResponse(),
    "StopExpertDistributionRecord": pb.StopExpertDistributionRecordResponse(),
    "DumpExpertDistributionRecord": pb.DumpExpertDistributionRecordResponse(
        recording=True, num_tokens=3, num_experts_per_tok=1, logical_count=[pb.ExpertCounts(layer=2, counts=[1, 2])]
    ),
    "FreezeGc": pb.FreezeGcResponse(objects=5),
    "ReleaseMemory": pb.ReleaseMemoryResponse(released=[pb.MEMORY_TAG_WEIGHTS]),
    "ResumeMemory": pb.ResumeMemoryResponse(),
    "SetLogLevel": pb.SetLogLevelResponse(previous="info"),
    "TraceRequest": pb.TraceRequestResponse(events=[pb.TraceEvent(kind="queued", detail=3)]),
}


@dataclass
class FakeControl:
    """A control service that records its calls."""

    refusal: tuple[grpc.StatusCode, str] | None = None  # status and message of every response, or None for success
    calls: list[tuple[str, Message, float, str]] = field(default_factory=list)  # method, request, seconds left, authorization

    def method(self, name: str) -> Callable[[Message, grpc.aio.ServicerContext], Awaitable[Message]]:
        async def answer(request: Message, context: grpc.aio.ServicerContext) -> Message:
            given = dict(context.invocation_metadata()).get("authorization", "")
            self.calls.append((name, request, context.time_remaining() or 0.0, given))
            if self.refusal is not None:
                await context.abort(*self.refusal)
            return ANSWERS[name]

        return answer

    async def start(self) -> tuple[grpc.aio.Server, str]:
        servicer = type("Servicer", (), {name: staticmethod(self.method(name)) for name in ANSWERS})()
        server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"


@dataclass
class FakeRequests:
    """The open requests of this gateway and of the other gateways."""

    num_local: int = 2  # open requests of this gateway, all of which an abort ends
    remote: tuple[PeerAnswer, ...] = ()  # results of an abort at the other gateways
    scopes: list[AbortScope] = field(default_factory=list)  # scopes of the aborts at this gateway

    def abort_local(self, scope: AbortScope, error: ApiError) -> int:
        self.scopes.append(scope)
        return self.num_local

    async def abort_remote(self, scope: AbortScope) -> tuple[PeerAnswer, ...]:
        return self.remote

    def aborter(self) -> Aborter:
        local = type("Local", (), {"abort": staticmethod(self.abort_local)})()
        return Aborter(local, type("Remote", (), {"abort": staticmethod(self.abort_remote)})())


class NoWorkers:
    """A fleet without workers."""

    def __init__(self) -> None:
        self.links: Mapping[str, WorkerLink[Any]] = {}

    def pool_of(self, link: WorkerLink[Any]) -> None:
        raise AssertionError(link)


@asynccontextmanager
async def listening(config: GatewaySettings, requests: FakeRequests | None = None) -> AsyncIterator[None]:
    """Runs the admin API for the workers in the settings. The access log is complete when the block has ended."""
    token = read_token(config.control_token, config.control_token_file)
    directory = WorkerDirectory(NoWorkers(), config.worker_control_addresses)
    bodies = BodyBudget(1 << 26, 1.0, 1, GatewayMetrics(CollectorRegistry()))
    access = AccessLog(config.access_log if config.access_log_file else "off", config.access_log_file)
    async with admin_listener(config, token, directory, (requests or FakeRequests()).aborter(), bodies, access=access):
        yield
    access.close()


@asynccontextmanager
async def admin(
    *workers: FakeControl, down: int = 0, requests: FakeRequests | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Runs the admin API with fake workers, and with `down` further addresses at which nothing listens."""
    started = [await worker.start() for worker in workers]
    port, *unused = free_ports(1 + down)
    addresses = [address for _, address in started] + [f"127.0.0.1:{number}" for number in unused]
    config = GatewaySettings(admin_port=port, worker_control_addresses=",".join(addresses), **settings)
    try:
        async with listening(config, requests), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
    finally:
        for server, _ in started:
            await server.stop(0)


def call_one_worker(method: str, path: str, content: bytes = b"", **kwargs: Any) -> tuple[httpx.Response, FakeControl]:
    """Sends a request to an admin API with one worker on which each operation succeeds."""

    async def run() -> tuple[httpx.Response, FakeControl]:
        worker = FakeControl()
        async with admin(worker, **kwargs.pop("settings", {})) as client:
            return await client.request(method, path, content=content, **kwargs), worker

    return asyncio.run(run())


@pytest.mark.by_day(one_in=5)
@pytest.mark.parametrize(
    ("method", "path", "body", "rpc", "request_"),
    [
        ("POST", "/flush_cache", '{"empty_cache": true}', "FlushCache", pb.FlushCacheRequest()),
        ("POST", "/flush_cache", '{"tiers": ["host"]}', "FlushCache", pb.FlushCacheRequest(tiers=["host"])),
        ("POST", "/clear_hicache_storage_backend", "", "FlushCache", pb.FlushCacheRequest(tiers=["storage"])),
        (
            "POST",
            "/clear_hicache_storage_backend",
            '{"older_than_s": 60}',
            "FlushCache",
            pb.FlushCacheRequest(tiers=["storage", "selected"], older_than_s=60),
        ),
        ("POST", "/flush_cache", '{"cache_salt": ""}', "FlushCache", pb.FlushCacheRequest(tiers=["selected"], cache_salt="")),
        ("POST", "/flush_cache", '{"extra_key": "a"}', "FlushCache", pb.FlushCacheRequest(tiers=["selected"], cache_salt="a")),
        ("GET", "/get_server_info", "", "GetInternalState", pb.GetInternalStateRequest()),
        ("GET", "/server_info", "", "GetInternalState", pb.GetInternalStateRequest()),
        ("GET", "/set_internal_state", "", "GetInternalState", pb.GetInternalStateRequest()),
        (
            "POST",
            "/set_internal_state",
            '{"server_args": {"policy": "lpm", "chunk": 64, "ratio": 0.5, "mixed": true}}',
            "SetInternalState",
            CHANGE,
        ),
        ("POST", "/slow_down", '{"forward_sleep_time": 0.25}', "SlowDown", pb.SlowDownRequest(step_delay_s=0.25)),
        ("POST", "/slow_down", '{"forward_sleep_time": null}', "SlowDown", pb.SlowDownRequest()),
        ("POST", "/pause_generation", "", "Pause", pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT)),
        ("POST", "/pause_generation", '{"mode": "retract"}', "Pause", pb.PauseRequest(mode=pb.PAUSE_MODE_RETRACT)),
        ("POST", "/pause_generation", '{"mode": "in_place"}', "Pause", pb.PauseRequest(mode=pb.PAUSE_MODE_IN_PLACE)),
        ("POST", "/continue_generation", "{}", "Continue", pb.ContinueRequest()),
        ("POST", "/start_profile", "", "StartProfile", pb.StartProfileRequest()),
        ("POST", "/start_profile", '{"name": "slow"}', "StartProfile", pb.StartProfileRequest(name="slow")),
        ("POST", "/stop_profile", "", "StopProfile", pb.StopProfileRequest()),
        *(
            (
                "POST",
                f"/{verb}_expert_distribution_record",
                "",
                f"{verb.title()}ExpertDistributionRecord",
                getattr(pb, f"{verb.title()}ExpertDistributionRecordRequest")(),
            )
            for verb in ("start", "stop", "dump")
        ),
        ("POST", "/freeze_gc", "", "FreezeGc", pb.FreezeGcRequest()),
        ("POST", "/release_memory_occupation", "", "ReleaseMemory", pb.ReleaseMemoryRequest()),
        (
            "POST",
            "/release_memory_occupation",
            '{"tags": ["kv_cache", "weights"]}',
            "ReleaseMemory",
            pb.ReleaseMemoryRequest(tags=[pb.MEMORY_TAG_KV_CACHE, pb.MEMORY_TAG_WEIGHTS]),
        ),
        (
            "POST",
            "/resume_memory_occupation",
            '{"tags": ["weights"]}',
            "ResumeMemory",
            pb.ResumeMemoryRequest(tags=[pb.MEMORY_TAG_WEIGHTS]),
        ),
        ("POST", "/configure_logging", '{"log_level": "debug"}', "SetLogLevel", pb.SetLogLevelRequest(level="debug")),
        ("POST", "/trace_request", '{"request_id": "r"}', "TraceRequest", pb.TraceRequestRequest(request_id="r")),
    ],
)
def test_admin_route_sends_the_operation_to_the_worker(method: str, path: str, body: str, rpc: str, request_: Message) -> None:
    response, worker = call_one_worker(method, path, body.encode())
    assert response.status_code == 200, response.text
    ((called, sent, _, _),) = worker.calls
    assert (called, sent) == (rpc, request_)
    assert response.json()["success"] and response.json()["workers"][0]["ok"]


@pytest.mark.parametrize(("body", "salt"), [({}, ""), ({"cache_salt": "a"}, "a"), ({"cache_salt": "a", "extra_key": "b"}, None)])
def test_flush_uses_the_cache_salt_of_the_api_key(body: dict[str, str], salt: str | None) -> None:
    salted = joined_salt("a", "b") if salt is None else salt  # None means that the body has cache_salt and extra_key
    content = json.dumps({"api_key": "team-a", **body}).encode()
    _, worker = call_one_worker("POST", "/flush_cache", content, settings={"salt_cache_by_key": True})
    ((_, sent, _, _),) = worker.calls
    assert sent.cache_salt == Caller(key="team-a", salts_cache=True).cache_salt_of(salted)
    refused, worker = call_one_worker("POST", "/flush_cache", content)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "api_key" and not worker.calls


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_flush_refuses_a_cache_salt_without_an_api_key_when_the_cache_is_salted_by_key(name: str) -> None:
    refused, worker = call_one_worker(
        "POST", "/flush_cache", json.dumps({name: "a"}).encode(), settings={"salt_cache_by_key": True}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "api_key" and not worker.calls


def test_every_operation_has_a_route() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Control"].methods
    assert {operation.rpc for operation in CONTROL.values()} == {method.name for method in methods}


def test_control_page_lists_every_route() -> None:
    page = (Path(__file__).parents[4] / "docs/reference/control.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    for (method, path), operation in ROUTES.items():
        (row,) = [row for row in rows if f"{path}`" in row and f"`{method} " in row]
        assert row.startswith(f"| `{operation.rpc}`") or not operation.rpc


def test_worker_response_is_plain_json() -> None:
    response, _ = call_one_worker("GET", "/server_info")
    (worker,) = response.json()["workers"]
    assert worker["result"]["tunables"] == {"policy": "lpm", "chunk": 1 << 40}
    assert worker["result"]["released"] == ["kv_cache"]
    assert worker["result"]["stats"] == {}
    response, _ = call_one_worker("POST", "/flush_cache")
    assert response.json()["workers"][0]["result"] == {"pages": 12}


BUSY = FakeControl((grpc.StatusCode.FAILED_PRECONDITION, "2 requests run"))
BAD_ARGUMENT = FakeControl((grpc.StatusCode.INVALID_ARGUMENT, "chunk: is below a page"))
FAULTY = FakeControl((grpc.StatusCode.INTERNAL, "fault"))
OTHER_TOKEN = FakeControl((grpc.StatusCode.UNAUTHENTICATED, "a valid token is required"))


@pytest.mark.parametrize(
    ("workers", "down", "status", "codes"),  # `down` is the number of workers that do not run
    [
        ([FakeControl(), FakeControl()], 0, 200, [None, None]),
        ([FakeControl(), BUSY], 0, 409, [None, "FAILED_PRECONDITION"]),
        ([BAD_ARGUMENT, BAD_ARGUMENT], 0, 400, ["INVALID_ARGUMENT", "INVALID_ARGUMENT"]),
        ([BAD_ARGUMENT, BUSY], 0, 409, ["INVALID_ARGUMENT", "FAILED_PRECONDITION"]),
        ([FAULTY, BUSY, FakeControl()], 0, 502, ["INTERNAL", "FAILED_PRECONDITION", None]),
        ([FakeControl(), OTHER_TOKEN], 0, 502, [None, "UNAUTHENTICATED"]),
        ([FakeControl()], 1, 502, [None, "UNAVAILABLE"]),
    ],
)
def test_response_has_a_result_for_each_worker(
    workers: list[FakeControl], down: int, status: int, codes: list[str | None]
) -> None:
    async def run() -> httpx.Response:
        async with admin(*workers, down=down) as client:
            return await client.post("/flush_cache")

    response = asyncio.run(run())
    body = response.json()
    assert (response.status_code, body["success"]) == (status, status == 200)
    assert [worker.get("error", {}).get("code") for worker in body["workers"]] == codes
    for worker, code, fake in zip(body["workers"], codes, [*workers, None], strict=False):
        assert worker["ok"] == (code is None)
        if fake is not None and fake.refusal is not None:
            assert worker["error"]["message"] == fake.refusal[1]


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", '{"mode": "sleep"}', "mode"),
        ("/pause_generation", '{"modus": "abort"}', "modus"),
        ("/pause_generation", "[]", None),
        ("/pause_generation", "{", None),
        ("/slow_down", '{"forward_sleep_time": "1"}', "forward_sleep_time"),
        ("/set_internal_state", "{}", "server_args"),
        ("/set_internal_state", '{"server_args": {}}', "server_args"),
        ("/set_internal_state", '{"server_args": {"a": null}}', None),
        ("/release_memory_occupation", '{"tags": ["kv"]}', "tags.0"),
        ("/release_memory_occupation", '{"tags": "weights"}', "tags"),
        ("/start_profile", '{"output_dir": "/etc"}', "output_dir"),
        ("/configure_logging", "{}", "log_level"),
        ("/flush_cache", '{"timeout_s": 0}', "timeout_s"),
        ("/flush_cache", '{"timeout_s": 3601}', "timeout_s"),
    ],
)
def test_request_with_an_invalid_body_gets_400_and_reaches_no_worker(path: str, body: str, param: str | None) -> None:
    response, worker = call_one_worker("POST", path, body.encode())
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert not worker.calls


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/flush_cache", 405), ("POST", "/server_info", 405), ("GET", "/", 404), ("POST", "/v1/chat/completions", 404)],
)
def test_unknown_route_is_refused(method: str, path: str, status: int) -> None:
    response, worker = call_one_worker(method, path)
    assert response.status_code == status and response.json()["error"]["code"] and not worker.calls
    assert response.headers.get("allow") == {"/flush_cache": "POST", "/server_info": "GET"}.get(path)


@pytest.mark.parametrize("header", [None, "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN} x"])
def test_request_without_the_control_token_reaches_no_worker(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    response, worker = call_one_worker("POST", "/flush_cache", headers=headers, settings={"control_token": TOKEN})
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert not worker.calls


def test_control_token_is_sent_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    for settings in ({"control_token": TOKEN}, {"control_token_file": str(tmp_path / "token")}):
        response, worker = call_one_worker(
            "POST", "/flush_cache", headers={"authorization": f"Bearer {TOKEN}"}, settings=settings
        )
        assert response.status_code == 200
        assert worker.calls[0][3] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("place", ["body", "query"])
def test_operation_reaches_only_the_named_worker(place: str) -> None:
    workers = [FakeControl(), FakeControl()]

    async def run() -> list[httpx.Response]:
        async with admin(*workers) as client:
            entries = (await client.post("/flush_cache")).json()["workers"]
            name = entries[1]["worker"]
            sent = {"json": {"worker": name}} if place == "body" else {"params": {"worker": name}}
            unknown = await client.post("/flush_cache", json={"worker": "no-such-worker"})
            conflicting = await client.post("/flush_cache", json={"worker": name}, params={"worker": "another"})
            misspelt = await client.post("/flush_cache", params={"wrkr": name})
            return [await client.post("/flush_cache", **sent), unknown, conflicting, misspelt]

    answer, unknown, conflicting, misspelt = asyncio.run(run())
    assert [entry["ok"] for entry in answer.json()["workers"]] == [True]
    assert [len(worker.calls) for worker in workers] == [1, 2]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "worker_not_found")
    assert [(each.status_code, each.json()["error"]["param"]) for each in (conflicting, misspelt)] == [
        (400, "worker"),
        (400, "wrkr"),
    ]


def test_abort_reaches_all_gateways() -> None:
    down = PeerAnswer("10.0.0.9:7005", message="UNAVAILABLE: no")
    peers = (PeerAnswer("10.0.0.7:7005", b"x", aborted=3), PeerAnswer("10.0.0.8:7005", b"y", aborted=0))

    async def run(requests: FakeRequests, body: Any) -> httpx.Response:
        async with admin(FakeControl(), requests=requests) as client:
            return await client.post("/abort_request", json=body)

    requests = FakeRequests(num_local=2, remote=peers)
    answer = asyncio.run(run(requests, {"abort_all": True}))
    assert answer.status_code == 200 and requests.scopes == [AbortScope(None, None)]
    assert answer.json() == {"success": True, "aborted": 5, "gateways": 3, "unreached": []}
    requests = FakeRequests(num_local=2, remote=(*peers, down))
    answer = asyncio.run(run(requests, {"rid": "r"}))
    assert answer.status_code == 502 and requests.scopes == [AbortScope("r", None)]
    assert answer.json()["unreached"] == [{"gateway": down.address, "message": down.message}]
    for invalid in ({}, {"rid": ""}, {"rid": "r", "abort_all": True}, {"abort_all": False}):
        assert asyncio.run(run(requests, invalid)).status_code == 400


def test_abort_is_refused_when_the_worker_id_is_unknown() -> None:
    """An abort finds requests by the worker id. This gateway was never connected to the worker and has only its address."""

    async def run() -> httpx.Response:
        async with admin(FakeControl(), requests=requests) as client:
            (known,) = (await client.post("/flush_cache", json={})).json()["workers"]
            return await client.post("/abort_request", json={"rid": "r", "worker": known["address"]})

    requests = FakeRequests()
    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "worker_unknown") and not requests.scopes


def test_request_with_an_origin_header_gets_403() -> None:
    response, worker = call_one_worker("POST", "/flush_cache", headers={"origin": "http://example.com"})
    assert response.status_code == 403 and not worker.calls


def test_timeout_in_the_body_replaces_the_setting_control_timeout_s() -> None:
    _, worker = call_one_worker("POST", "/flush_cache", settings={"control_timeout_s": 30})
    assert 20 < worker.calls[0][2] <= 31, "a call with 30 s; gRPC rounds the deadline up"
    _, worker = call_one_worker("POST", "/flush_cache", b'{"timeout_s": 300}', settings={"control_timeout_s": 30})
    assert 200 < worker.calls[0][2] <= 302, "a call with 300 s"


def test_request_with_a_large_body_gets_413() -> None:
    response, worker = call_one_worker(
        "POST", "/set_internal_state", json.dumps({"server_args": {"a": "x" * (1 << 20)}}).encode()
    )
    assert response.status_code == 413 and not worker.calls


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"admin_host": "0.0.0.0"}, "set control_token"),
        ({"control_token_file": "/nowhere/token"}, "/nowhere/token"),
        ({"control_token": "a", "control_token_file": "b"}, "set only one"),
    ],
)
def test_admin_listener_does_not_start_without_a_usable_control_token(settings: dict[str, Any], message: str) -> None:
    config = GatewaySettings(**{"admin_port": 1, "worker_control_addresses": "127.0.0.1:1", **settings})

    async def run() -> None:
        gateway = Gateway(config)
        async with admin_listener(config, gateway.token, gateway.directory, gateway.aborter, gateway.bodies):
            raise AssertionError("the listener started")

    with pytest.raises(http_server.CannotListen, match=message):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "headers", "route", "status", "code", "end"),
    [
        ("POST", "/flush_cache", {}, "/flush_cache", 200, "", "complete"),
        ("GET", "/flush_cache", {}, "/flush_cache", 405, "method_not_allowed", "refused"),
        ("POST", "/secret-path?secret=query", {}, "other", 404, "not_found", "refused"),
        ("POST", "/flush_cache", {"origin": "https://example.com"}, "/flush_cache", 403, "forbidden", "refused"),
    ],
    ids=["done", "method", "path", "origin"],
)
def test_access_log_has_a_line_for_each_admin_request(
    tmp_path: Path, method: str, path: str, headers: dict[str, str], route: str, status: int, code: str, end: str
) -> None:
    log = tmp_path / "access.log"
    response, _ = call_one_worker(method, path, b'{"tiers": ["host"]}', headers=headers, settings={"access_log_file": str(log)})
    (line,) = map(orjson.loads, log.read_bytes().splitlines())
    assert {name: line[name] for name in ("source", "method", "route", "status", "code", "end", "bytes")} == {
        "source": "admin",
        "method": method,
        "route": route,
        "status": status,
        "code": code,
        "end": end,
        "bytes": len(response.content),
    }
    assert "secret" not in log.read_text() and "host" not in log.read_text()


def test_admin_api_is_off_without_a_port() -> None:
    async def run() -> None:
        async with listening(GatewaySettings()):
            assert len(asyncio.all_tasks()) == 1, "only the task of this test runs"

    asyncio.run(run())


def test_gateway_process_serves_the_admin_port(system: System) -> None:
    async def start() -> tuple[grpc.aio.Server, str]:
        return await FakeControl().start()

    server, address = system.call(start())
    (port,) = free_ports(1)
    process = Process(
        system, "--admin-port", str(port), "--worker-control-addresses", address, "--control-token", TOKEN, "--log-level", "debug"
    )
    try:
        process.wait_ready()
        url = f"http://127.0.0.1:{port}/flush_cache"
        assert httpx.post(url).status_code == 401
        assert httpx.post(url, headers={"authorization": f"Bearer {TOKEN}"}).json()["workers"][0]["result"] == {"pages": 12}
        assert httpx.post(f"http://127.0.0.1:{process.port}/flush_cache").status_code == 404, (
            "the port for clients has no admin routes"
        )
        process.terminate()
        code, log = process.wait()
        assert code == 0 and TOKEN not in json.dumps(log)
    finally:
        process.kill()
        system.call(server.stop(0))


@pytest.mark.parametrize("flags", [["--admin-host", "0.0.0.0"], ["--control-token-file", "/nowhere"]])
def test_gateway_does_not_start_without_a_usable_control_token(system: System, flags: list[str]) -> None:
    process = Process(system, "--admin-port", str(free_ports(1)[0]), "--worker-control-addresses", "127.0.0.1:1", *flags)
    code, log = process.wait()
    problems = [line for line in log if line["level"] == "error"]
    assert code == 2 and len(problems) == 1 and "control_token" in problems[0]["msg"] and "exception" not in problems[0]
