"""Tests of EndpointSlices: their conversion, and lists and watches of the real client at a fake API server."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from rootstock_llm.services.gateway.discovery import kubernetes_api, kubernetes_watch
from rootstock_llm.services.gateway.discovery.endpoints import KubernetesTarget
from rootstock_llm.services.gateway.discovery.kubernetes_api import endpoints_of, is_headless, number_of
from rootstock_llm.services.gateway.discovery.kubernetes_watch import KubernetesService
from tests.services.gateway.discovery.names import Names

WAIT_S = 60.0


def endpoint(*addresses: str, uid: str = "", **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": list(addresses), "conditions": conditions, **({"targetRef": {"uid": uid}} if uid else {})}


def slice_of(
    name: str, *endpoints: Any, family: str = "IPv4", ports: Any = ((7001, "grpc"),), version: str = "", headless: bool = False
) -> dict[str, Any]:
    labels = {"labels": {"service.kubernetes.io/headless": ""}} if headless else {}
    return {
        "metadata": {"name": name, "resourceVersion": version, **labels},
        "addressType": family,
        "ports": [{"port": number, "name": port} for number, port in ports],
        "endpoints": list(endpoints) or None,
    }


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        ({}, True),
        ({"ready": None, "terminating": None}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),  # publishNotReadyAddresses
    ],
)
def test_readiness_of_an_endpoint_follows_the_conditions_in_the_slice(conditions: dict[str, Any], ready: bool) -> None:
    assert endpoints_of([slice_of("a", endpoint("10.0.0.1", **conditions))], 7) == {"10.0.0.1:7": ready}


def test_endpoints_of_several_slices_are_merged() -> None:
    slices = [
        slice_of("a", endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2", "10.9.9.9")),
        slice_of("b", endpoint("10.0.0.1", ready=True), endpoint("10.0.0.3")),
        slice_of("empty"),
    ]
    assert endpoints_of(slices, 7) == {"10.0.0.1:7": True, "10.0.0.2:7": True, "10.0.0.3:7": True}


def test_dual_stack_pod_has_one_endpoint() -> None:
    slices = [
        slice_of("a", endpoint("fd00::1", uid="one"), endpoint("fd00::2", uid="two"), family="IPv6"),
        slice_of("b", endpoint("10.0.0.1", uid="one"), family="IPv4"),
    ]
    assert endpoints_of(slices, 7) == {"10.0.0.1:7": True, "[fd00::2]:7": True}


def test_port_name_is_looked_up_in_each_slice() -> None:
    slices = [
        slice_of("a", endpoint("10.0.0.1"), ports=((7001, "grpc"), (9101, "metrics"))),
        slice_of("b", endpoint("10.0.0.2"), ports=((7002, "grpc"),)),
        slice_of("c", endpoint("10.0.0.3"), ports=((7003, "http"),)),
    ]
    assert endpoints_of(slices, "grpc") == {"10.0.0.1:7001": True, "10.0.0.2:7002": True}


class ApiServer:
    """An API server that lists `slices`. A watch sends the events that are newer than its version, until its timeout or cut()."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.version = 1
        self.oldest = 0  # oldest version from which a watch may start
        self.refuse: dict[str, int] = {}  # "list" or "watch" → status
        self.queries: list[dict[str, str]] = []
        self.tokens: set[str] = set()
        self._events: list[tuple[int, bytes]] = []
        self._cuts = 0
        self._changed = threading.Condition()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._serve(self)

            def log_message(self, *_: Any) -> None:
                return

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.host = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[ApiServer]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self.cut()
            self._http.shutdown()
            thread.join()
            self._http.server_close()

    def load_client(self) -> client.ApiClient:
        configuration = client.Configuration(host=self.host, api_key={"BearerToken": "Bearer secret"})
        configuration.proxy = None
        configuration.retries = False
        return client.ApiClient(configuration)

    def watches(self) -> list[dict[str, str]]:
        return [query for query in self.queries if query.get("watch") == "true"]

    def lists(self) -> int:
        return len(self.queries) - len(self.watches())

    def send(self, kind: str, slice_: dict[str, Any]) -> None:
        with self._changed:
            self.version += 1
            slice_["metadata"]["resourceVersion"] = str(self.version)
            self.slices = [one for one in self.slices if one["metadata"]["name"] != slice_["metadata"]["name"]]
            if kind != "DELETED":
                self.slices.append(slice_)
            self._events.append((self.version, json.dumps({"type": kind, "object": slice_}).encode() + b"\n"))
            self._changed.notify_all()

    def send_other(self, event: dict[str, Any]) -> None:
        """Sends an event that is not about a slice."""
        with self._changed:
            self.version += 1
            self._events.append((self.version, json.dumps(event).encode() + b"\n"))
            self._changed.notify_all()

    def cut(self) -> None:
        """Breaks the connection of every watch in the middle of a line."""
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    def _serve(self, request: http.server.BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        query = {key: values[0].lower() for key, values in parse_qs(url.query).items()} | {"path": url.path}
        with self._changed:
            cuts = self._cuts  # read before the request is in `queries`, so that a cut() after that ends the request
            self.queries.append(query)
        self.tokens.add(request.headers.get("Authorization", ""))
        is_watch = query.get("watch") == "true"
        status = self.refuse.get("watch" if is_watch else "list", 200)
        if status != 200:
            self._answer(request, status, {"kind": "Status", "message": "refused", "code": status})
        elif is_watch:
            self._watch(request, int(query["resourceversion" if "resourceversion" in query else "resourceVersion"]), query, cuts)
        else:
            self._answer(request, 200, {"metadata": {"resourceVersion": str(self.version)}, "items": self.slices or None})

    @staticmethod
    def _answer(request: http.server.BaseHTTPRequestHandler, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _watch(self, request: http.server.BaseHTTPRequestHandler, version: int, query: dict[str, str], cuts: int) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        if version < self.oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
            self._chunk(request, json.dumps(gone).encode() + b"\n")
            self._chunk(request, b"")
            return
        end = time.monotonic() + float(query["timeoutSeconds"])
        with self._changed:
            while time.monotonic() < end and self._cuts == cuts:
                for at, line in [event for event in self._events if event[0] > version]:
                    self._chunk(request, line[:9])  # a line comes in pieces
                    self._chunk(request, line[9:])
                    version = at
                self._changed.wait(max(0.0, end - time.monotonic()))
        if self._cuts != cuts:
            with contextlib.suppress(OSError):
                self._chunk(request, b'{"type": "ADDED", "obj')
            request.close_connection = True
            return
        self._chunk(request, b"")

    @staticmethod
    def _chunk(request: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
        request.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        request.wfile.flush()


class Reports:
    def __init__(self) -> None:
        self.reported: list[dict[str, bool]] = []
        self.names = Names()

    async def until(self, endpoints: dict[str, bool]) -> None:
        await eventually(
            lambda: bool(self.reported) and self.reported[-1] == endpoints, lambda: f"{endpoints} in {self.reported}"
        )


async def eventually(condition: Callable[[], bool], what: Callable[[], str] = lambda: "condition") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what()}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def following(server: ApiServer, port: int | str = 7001, namespace: str = "llm", **times: float) -> AsyncIterator[Reports]:
    reports = Reports()
    target = KubernetesTarget("tokenizer", namespace, port)
    service = KubernetesService(
        target, lambda found: reports.reported.append(dict(found)), 0.01, reports.names.resolve, server.load_client, **times
    )
    reports.names.trouble = lambda: service.trouble
    task = asyncio.create_task(service.run())
    try:
        yield reports
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])
        await eventually(lambda: not any("endpoints of" in thread.name for thread in threading.enumerate()))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setattr(kubernetes_watch, "FIRST_PAUSE_S", 0.02)
    with ApiServer().running() as running:
        yield running


def test_kubernetes_watch_lists_and_follows_slices(server: ApiServer) -> None:
    async def run() -> None:
        server.slices = [slice_of("a", endpoint("10.0.0.1"))]
        async with following(server, "grpc") as reports:
            await reports.until({"10.0.0.1:7001": True})
            await eventually(lambda: len(server.watches()) == 1)
            server.send("ADDED", slice_of("b", endpoint("10.0.0.2", ready=False)))
            await reports.until({"10.0.0.1:7001": True, "10.0.0.2:7001": False})
            server.send("MODIFIED", slice_of("b", endpoint("10.0.0.2", ready=True)))
            await reports.until({"10.0.0.1:7001": True, "10.0.0.2:7001": True})
            server.send("DELETED", slice_of("a"))
            await reports.until({"10.0.0.2:7001": True})
            server.send("MODIFIED", slice_of("b"))
            await reports.until({})
            assert server.lists() == 1
            query = server.watches()[0]
            assert query["path"] == "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
            assert query["labelSelector"] == "kubernetes.io/service-name=tokenizer"
            assert query["resourceVersion"] == "1" and query["allowWatchBookmarks"] == "true"
            assert server.tokens == {"Bearer secret"}

    asyncio.run(run())


def test_kubernetes_watch_reports_only_changes(server: ApiServer) -> None:
    async def run() -> None:
        async with following(server) as reports:
            await reports.until({})
            server.send("ADDED", slice_of("a", endpoint("10.0.0.1")))
            server.send("MODIFIED", slice_of("a", endpoint("10.0.0.1", ready=True)))
            server.send("ADDED", slice_of("b", endpoint("10.0.0.2")))
            await reports.until({"10.0.0.1:7001": True, "10.0.0.2:7001": True})
            assert len(reports.reported) == 3

    asyncio.run(run())


def test_kubernetes_watch_continues_at_the_last_version(server: ApiServer) -> None:
    async def run() -> None:
        async with following(server, watch_s=3.0) as reports:
            await reports.until({})
            server.send("ADDED", slice_of("a", endpoint("10.0.0.1")))
            await reports.until({"10.0.0.1:7001": True})
            server.send_other({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "40"}}})
            server.version = 41
            await eventually(lambda: len(server.watches()) >= 2)
            assert server.watches()[1]["resourceVersion"] == "40"
            assert server.lists() == 1 and reports.reported[-1] == {"10.0.0.1:7001": True}

    asyncio.run(run())


@pytest.mark.parametrize("as_status", [False, True], ids=["as an event", "as a status"])
def test_kubernetes_watch_lists_again_when_the_version_is_gone(
    server: ApiServer, as_status: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with following(server) as reports:
            await reports.until({})
            await eventually(lambda: len(server.watches()) == 1)
            if as_status:
                server.refuse["watch"] = 410
                server.cut()
                await eventually(lambda: len(server.watches()) >= 2)
            else:
                server.send_other({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
            server.slices = [slice_of("a", endpoint("10.0.0.1"))]  # no event reports this slice
            server.refuse.clear()
            await reports.until({"10.0.0.1:7001": True})
            assert as_status or "cannot be read" not in caplog.text, "the expiry of a version is no failure"

    asyncio.run(run())


def test_kubernetes_watch_reconnects_when_a_watch_breaks(server: ApiServer) -> None:
    async def run() -> None:
        async with following(server) as reports:
            server.send("ADDED", slice_of("a", endpoint("10.0.0.1")))
            await reports.until({"10.0.0.1:7001": True})
            for n in range(2, 5):
                watches = len(server.watches())
                server.cut()
                await eventually(lambda watches=watches: len(server.watches()) > watches)
                server.send("MODIFIED", slice_of("a", endpoint(f"10.0.0.{n}")))
                await reports.until({f"10.0.0.{n}:7001": True})
            assert {} not in reports.reported[1:], "the watch keeps the last endpoints"

    asyncio.run(run())


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_kubernetes_watch_keeps_endpoints_when_access_is_denied(
    server: ApiServer, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        server.slices = [slice_of("a", endpoint("10.0.0.1"))]
        async with following(server) as reports:
            await reports.until({"10.0.0.1:7001": True})
            await eventually(lambda: len(server.watches()) == 1)
            server.refuse[verb] = 403
            server.cut()
            refused = len(server.queries)
            await eventually(lambda: len(server.queries) >= refused + 4)
            assert reports.reported == [{"10.0.0.1:7001": True}]
            assert "the last endpoints stay" in caplog.text and "needs list and watch on endpointslices" in caplog.text
            assert not reports.names.lookups, "DNS gives one address for all pods, which is not used"
            server.refuse.clear()
            server.slices = [slice_of("a", endpoint("10.0.0.2"))]
            await reports.until({"10.0.0.2:7001": True})

    asyncio.run(run())


@pytest.mark.parametrize("verb", ["list", "watch"])
@pytest.mark.parametrize("port", [7001, "grpc"])
def test_kubernetes_service_uses_dns_when_access_is_denied(
    server: ApiServer, verb: str, port: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        server.slices = [slice_of("a", endpoint("10.0.0.1"), headless=True)]
        async with following(server, port) as reports:
            await reports.until({"10.0.0.1:7001": True})
            await eventually(lambda: len(server.watches()) == 1)
            assert not reports.names.lookups
            reports.names.answer = ["10.0.0.2", "10.0.0.3"]
            server.refuse[verb] = 403
            server.cut()
            await reports.until({"10.0.0.2:7001": True, "10.0.0.3:7001": True})
            assert reports.names.last == ("tokenizer.llm.svc", 7001)
            assert "looking up tokenizer.llm.svc by DNS instead" in caplog.text
            reports.names.answer = OSError("no server")
            await eventually(lambda: reports.names.trouble() == "no server")
            server.slices = [slice_of("a", endpoint("10.0.0.4", ready=False), headless=True)]
            server.refuse.clear()
            await reports.until({"10.0.0.4:7001": False})
            seen, reports.names.answer = reports.names.lookups, ["10.0.0.5"]
            await asyncio.sleep(0.1)
            assert (
                reports.names.lookups == seen
                and reports.names.trouble() == ""
                and reports.reported[-1] == {"10.0.0.4:7001": False}
            )

    asyncio.run(run())


def test_kubernetes_service_ignores_an_empty_dns_result(server: ApiServer) -> None:
    async def run() -> None:
        server.slices = [slice_of("a", endpoint("10.0.0.1"), headless=True)]
        async with following(server) as reports:
            await reports.until({"10.0.0.1:7001": True})
            server.refuse["list"] = server.refuse["watch"] = 401
            server.cut()
            await eventually(lambda: reports.names.lookups >= 4)
            assert reports.reported == [{"10.0.0.1:7001": True}]
            server.refuse.clear()
            server.slices = []
            await reports.until({})

    asyncio.run(run())


def test_kubernetes_service_waits_for_the_api_server_before_using_dns(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server.slices = [slice_of("a", endpoint("10.0.0.1"), headless=True)]
        async with following(server) as reports:
            reports.names.answer = ["10.0.0.2"]
            await reports.until({"10.0.0.1:7001": True})
            await eventually(lambda: len(server.watches()) == 1)
            server.refuse["list"] = server.refuse["watch"] = 503
            server.cut()
            refused = len(server.queries)
            await eventually(lambda: len(server.queries) >= refused + 4)
            assert not reports.names.lookups and reports.reported == [{"10.0.0.1:7001": True}]
            monkeypatch.setattr(kubernetes_watch, "PATIENCE_S", 0.0)
            await reports.until({"10.0.0.2:7001": True})
            server.refuse.clear()
            await reports.until({"10.0.0.1:7001": True})

    asyncio.run(run())


@pytest.mark.parametrize(
    "slices",
    [
        [],
        [slice_of("a", headless=True), slice_of("b")],
        [slice_of("a", headless=True), slice_of("b", ports=((7002, "grpc"),), headless=True)],
        [slice_of("a", ports=((7001, "http"),), headless=True)],
    ],
    ids=["no slices", "not headless", "two port numbers", "no such port"],
)
def test_dns_fallback_is_impossible_when_the_service_is_not_headless_or_the_port_is_unknown(slices: list[dict[str, Any]]) -> None:
    assert not is_headless(slices) or number_of(slices, "grpc") is None
    assert number_of(slices, 7) == 7


def test_kubernetes_watch_lists_again_after_resync_s(server: ApiServer) -> None:
    async def run() -> None:
        async with following(server, watch_s=1.0, resync_s=0.1) as reports:
            await reports.until({})
            server.slices = [slice_of("a", endpoint("10.0.0.1"))]  # no event reports this slice
            await reports.until({"10.0.0.1:7001": True})
            assert server.lists() >= 2

    asyncio.run(run())


def test_kubernetes_watch_retries_when_the_api_server_is_down_at_the_start(server: ApiServer) -> None:
    async def run() -> None:
        host, server.host = server.host, "http://127.0.0.1:1"
        clients: list[client.ApiClient] = []

        def load_client() -> client.ApiClient:
            clients.append(ApiServer.load_client(server))
            return clients[-1]

        reports = Reports()
        target = KubernetesTarget("tokenizer", "llm", 7001)
        service = KubernetesService(
            target, lambda found: reports.reported.append(dict(found)), 5.0, reports.names.resolve, load_client
        )
        task = asyncio.create_task(service.run())
        await eventually(lambda: len(clients) == 1)
        await asyncio.sleep(0.1)
        assert not reports.reported and not task.done()
        clients[0].configuration.host = host
        await reports.until({})
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())


def test_kubernetes_watch_uses_the_namespace_of_the_pod_by_default(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kubernetes_api.own_namespace(tmp_path / "none") == "default"
    (tmp_path / "namespace").write_text("team-a\n")
    monkeypatch.setattr(kubernetes_watch, "own_namespace", lambda: kubernetes_api.own_namespace(tmp_path / "namespace"))

    async def run() -> None:
        async with following(server, namespace="") as reports:
            await reports.until({})
            assert server.queries[0]["path"].endswith("/namespaces/team-a/endpointslices")

    asyncio.run(run())
