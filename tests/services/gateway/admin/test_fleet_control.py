"""Tests of the admin API with two real workers that a real gateway finds by discovery."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from rootstock_llm.protos import worker_pb2, worker_pb2_grpc
from rootstock_llm.services.gateway.admin.routes import admin_listener
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.gateway import Gateway
from rootstock_llm.services.gateway.http import http_server
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.worker.control.server import start_control
from rootstock_llm.services.worker.loop import progress
from tests.services.gateway.fakes import FakeDetokenizer, FakeTokenizer, Host
from tests.services.worker.conftest import CONFIG, Serving, serving
from tests.services.worker.control.address import control_at

GUARD_S = 180.0
# The step limit of the watchdog is lowest with small steps.
SMALL_STEPS = replace(CONFIG, chunked_prefill_size=16)


class Operated:
    """A running fleet, with an HTTP client for the admin port and an HTTP client for the port of the API."""

    def __init__(self, admin: httpx.AsyncClient, api: httpx.AsyncClient, workers: list[Serving], gateway: Gateway) -> None:
        self.admin, self.api, self.workers, self.gateway = admin, api, workers, gateway

    async def loads(self) -> dict[str, dict[str, Any]]:
        answer = await self.admin.get("/get_load")
        return {entry["worker"]: entry.get("result", entry) for entry in answer.json()["workers"]}

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while not await holds():
                await asyncio.sleep(0.01)

    def start(self, rid: str, tokens: int = 200) -> asyncio.Task[httpx.Response]:
        body = {"text": "Hi", "rid": rid, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        return asyncio.create_task(self.api.post("/generate", json=body))


@asynccontextmanager
async def operated(step_s: float = 0.005) -> AsyncIterator[Operated]:
    async with AsyncExitStack() as stack:
        admin_port, *controls = free_ports(3)
        workers, addresses = [], []
        for number, control_port in enumerate(controls):
            info = worker_pb2.WorkerInfo(
                worker_id=f"w{number}", control_port=control_port, max_running_requests=8, generates=True
            )
            worker = await stack.enter_async_context(serving(step_s=step_s, gap_s=0.01, info=info, config=SMALL_STEPS))
            control = await start_control(control_at(port=control_port), worker.inbox.put, info.worker_id, "fake")
            assert control is not None
            stack.push_async_callback(control.stop, 0)
            workers.append(worker)
            addresses.append(worker.address)
        fronts = [Host(FakeDetokenizer()), Host(FakeTokenizer())]
        for host in fronts:
            await host.start()
            stack.push_async_callback(host.stop)
        config = GatewaySettings(
            port=0, health_port=0, admin_port=admin_port, routing_policy="round_robin", workers=",".join(addresses),
            detokenizers=fronts[0].address, tokenizers=fronts[1].address, grace_s=0.1,
        )  # fmt: skip
        listener, stop, gateway = http_server.bind(HOST, 0), asyncio.Event(), Gateway(config)
        await stack.enter_async_context(admin_listener(config, gateway.token, gateway.directory, gateway.aborter, gateway.bodies))
        serving_gateway = asyncio.create_task(gateway.run(listener, stop))
        admin = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{HOST}:{admin_port}", timeout=60))
        url = f"http://{HOST}:{listener.getsockname()[1]}"
        api = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        at = Operated(admin, api, workers, gateway)
        try:
            await at.until(lambda: connected(at))
            yield at
        finally:
            stop.set()
            await serving_gateway


async def connected(at: Operated) -> bool:
    links = at.gateway.dispatcher.fleet.links.values()
    return len(links) == 2 and all(link.load is not None for link in links)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            await test()

    asyncio.run(guarded())


def test_operation_reaches_a_discovered_worker_by_name() -> None:
    async def check() -> None:
        async with operated() as at:
            everybody = (await at.admin.post("/flush_cache")).json()
            assert everybody["success"] and [entry["worker"] for entry in everybody["workers"]] == ["w0", "w1"]
            assert [entry["address"] for entry in everybody["workers"]] == [worker.address for worker in at.workers]
            for name in ("w1", at.workers[1].address):
                (entry,) = (await at.admin.get("/server_info", params={"worker": name})).json()["workers"]
                assert (entry["worker"], entry["result"]["worker_id"]) == ("w1", "w1")
            loads = await at.loads()
            assert {name: (load["model"], load["usable"], load["paused"]) for name, load in loads.items()} == {
                "w0": ("fake", True, False),
                "w1": ("fake", True, False),
            }

    run(check)


def test_paused_worker_gets_no_requests_and_abort_all_ends_requests_only_at_the_named_worker() -> None:
    async def check() -> None:
        async with operated(step_s=0.03) as at:
            first = [at.start(f"a{number}") for number in range(2)]
            await at.until(lambda: running(at, 1, 1))
            assert (await at.admin.post("/pause_generation", json={"mode": "in_place", "worker": "w0"})).status_code == 200
            await at.until(lambda: has_load(at, "w0", paused=True, usable=False))
            others = [at.start(f"b{number}") for number in range(3)]
            await at.until(lambda: running(at, 1, 4))
            assert (await at.api.get("/health_generate")).status_code == 200
            ended = (await at.admin.post("/abort_request", json={"abort_all": True, "worker": "w1"})).json()
            assert (ended["aborted"], ended["gateways"]) == (4, 1)
            await at.until(lambda: running(at, 1, 0))
            assert (await at.admin.post("/continue_generation", json={"worker": "w0"})).status_code == 200
            answers = [task.result().json() for task in [*first, *others] if await ended_by(task)]
            reasons = sorted(answer["meta_info"]["finish_reason"]["type"] for answer in answers)
            assert reasons == ["abort"] * 4 + ["length"]

    run(check)


def test_new_requests_are_refused_at_once_when_max_queued_requests_is_0_on_all_workers() -> None:
    async def check() -> None:
        async with operated(step_s=0.03) as at:
            first = [at.start(f"a{number}", 60) for number in range(2)]
            await at.until(lambda: running(at, 1, 1))
            await set_tunables(at, max_queued_requests=0)
            for worker in ("w0", "w1"):
                await at.until(lambda: has_load(at, worker, refuses_new=True, usable=True))  # noqa: B023
            refused = (await at.start("b")).json()["error"]
            assert refused["code"] == "queue_full" and "max_queued_requests" in refused["message"]
            assert [(await task).json()["meta_info"]["finish_reason"]["type"] for task in first] == ["length"] * 2
            await set_tunables(at, max_queued_requests=3)
            assert (await at.start("c", 4)).status_code == 200

    run(check)


async def set_tunables(at: Operated, **tunables: Any) -> None:
    answer = await at.admin.post("/set_internal_state", json={"server_args": tunables})
    assert answer.status_code == 200, answer.text
    state = (await at.admin.get("/set_internal_state")).json()["workers"]
    assert [{name: each["result"]["tunables"][name] for name in tunables} for each in state] == [tunables] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_queued_requests", -1), ("session_ttl_s", 0.0), ("adaptive_chunk_s", 1e300), ("max_sessions", 1 << 62)],
)
def test_admin_port_refuses_a_value_outside_the_range_of_the_setting(name: str, value: float) -> None:
    async def check() -> None:
        async with operated() as at:
            answer = await at.admin.post("/set_internal_state", json={"server_args": {name: value}})
            assert answer.status_code == (200 if name == "max_sessions" else 400), answer.text
            assert answer.status_code == 200 or f"{name}: is" in answer.text

    run(check)


async def ended_by(task: asyncio.Task[httpx.Response]) -> bool:
    await task
    return True


async def running(at: Operated, *counts: int) -> bool:
    return [load["open_here"] for load in (await at.loads()).values()] == list(counts)


async def has_load(at: Operated, worker: str, **fields: Any) -> bool:
    load = (await at.loads())[worker]
    return all(load[name] == value for name, value in fields.items())


def test_health_generate_returns_503_when_a_step_of_every_worker_exceeds_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FLOOR_S", 2.5)

    async def check() -> None:
        async with operated() as at:
            await asyncio.gather(at.start("a", 4), at.start("b", 4))  # each worker has measured a step
            returns, waits = threading.Event(), [worker.executor.wait for worker in at.workers]
            for worker, wait in zip(at.workers, waits, strict=True):
                worker.executor.wait = lambda run, wait=wait: returns.wait(60) and wait(run)  # type: ignore[method-assign]
            try:
                hung = [at.start("c"), at.start("d")]
                await at.until(lambda: running(at, 1, 1))
                # For each check: the smallest step age of the workers in ms, and the status of /health_generate.
                seen: list[tuple[int, int]] = []

                async def unhealthy() -> bool:
                    status = (await at.api.get("/health_generate")).status_code
                    seen.append((min(load["step_age_ms"] for load in (await at.loads()).values()), status))
                    return status == 503

                await at.until(unhealthy)
                assert seen[0][1] == 200 and seen[-1][0] > 2500
                assert {status for age, status in seen if age <= 2500} == {200}
            finally:
                returns.set()
            await asyncio.gather(*hung)
            assert (await at.api.get("/health_generate")).status_code == 200

    run(check)


def test_response_has_an_error_for_each_worker_without_a_reachable_control_service() -> None:
    async def check() -> None:
        async with operated() as at, bare_worker() as address:
            endpoints = dict.fromkeys([*(worker.address for worker in at.workers), address, "127.0.0.1:1"], True)
            at.gateway.dispatcher.fleet.set_endpoints(endpoints)
            await at.until(lambda: is_listed(at, "bare"))
            answer = await at.admin.post("/flush_cache")
            assert answer.status_code == 502
            entries = {entry["worker"]: entry for entry in answer.json()["workers"]}
            assert entries["w0"]["ok"] and entries["w1"]["ok"]
            assert "control_port" in entries["bare"]["error"]["message"]
            assert "never been connected" in entries["127.0.0.1:1"]["error"]["message"]
            assert (await at.admin.post("/flush_cache", json={"worker": "w0"})).status_code == 200

    run(check)


async def is_listed(at: Operated, worker: str) -> bool:
    return worker in await at.loads()


@asynccontextmanager
async def bare_worker() -> AsyncIterator[str]:
    """Yields the address of a worker that sends a hello and has no control service."""

    class Servicer(worker_pb2_grpc.WorkerServicer):
        async def Generate(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
            yield worker_pb2.GenerateResponse(hello=worker_pb2.WorkerInfo(worker_id="bare", model="fake", context_len=64))
            await asyncio.get_running_loop().create_future()

    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(Servicer(), server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(0)
