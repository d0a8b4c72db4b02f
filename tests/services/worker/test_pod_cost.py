"""Tests of the pod's deletion cost with an HTTP server in place of the Kubernetes API."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kubernetes.client import Configuration

from rootstock_llm.services.worker.pod_cost import ANNOTATION, PodCost, pod_patch


class Api(ThreadingHTTPServer):
    """Responds with `status`. Records method, path, content type and body of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.seen: list[tuple[str, str, str, object]] = []
        self.received = threading.Event()

    @property
    def costs(self) -> list[str]:
        return [body["metadata"]["annotations"][ANNOTATION] for _, _, _, body in self.seen]  # type: ignore[index]


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.command, self.path, self.headers["Content-Type"], body))
        response = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "w-0"}}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(response)))
        self.end_headers()
        self.wfile.write(response)
        self.server.received.set()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Load:
    def __init__(self) -> None:
        self.value = 0

    def __call__(self) -> int:
        return self.value


def cost_of(port: int, load: Load, **times: float) -> PodCost:
    configuration = Configuration(host=f"http://127.0.0.1:{port}")
    configuration.retries = False
    return PodCost(lambda: pod_patch("prod", "w-0", configuration), load, **times)


def test_pod_is_patched_with_the_deletion_cost_when_the_load_changes(api: Api) -> None:
    load = Load()
    cost = cost_of(api.server_port, load, period_s=7, pause_s=99)
    for load.value in (3, 3, 0, 0, 12):
        assert cost.write_if_changed() == 7
    assert api.costs == ["3", "0", "12"]
    assert {seen[:3] for seen in api.seen} == {("PATCH", "/api/v1/namespaces/prod/pods/w-0", "application/merge-patch+json")}


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("status", [403, 404, 500])
def test_refused_patch_is_logged_once_and_retried_later(api: Api, status: int, caplog: pytest.LogCaptureFixture) -> None:
    load = Load()
    cost = cost_of(api.server_port, load, period_s=7, pause_s=99)
    api.status = status
    with caplog.at_level(logging.INFO, "rootstock_llm.services.worker.pod_cost"):
        assert (cost.write_if_changed(), cost.write_if_changed()) == (99, 99)
        assert len(caplog.records) == 1 and str(status) in caplog.text
        api.status = 200
        assert (cost.write_if_changed(), cost.write_if_changed()) == (7, 7)
    assert len(caplog.records) == 2 and len(api.seen) == 3


def test_unreachable_kubernetes_api_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with Api() as gone:
        port = gone.server_port
    cost = cost_of(port, Load(), pause_s=99)
    with caplog.at_level(logging.INFO, "rootstock_llm.services.worker.pod_cost"):
        assert (cost.write_if_changed(), cost.write_if_changed()) == (99, 99)
    assert len(caplog.records) == 1


def test_missing_kubernetes_cluster_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    cost = PodCost(lambda: pod_patch("prod", "w-0"), Load(), pause_s=99)
    with caplog.at_level(logging.INFO, "rootstock_llm.services.worker.pod_cost"):
        assert (cost.write_if_changed(), cost.write_if_changed()) == (99, 99)
    assert len(caplog.records) == 1 and "KUBERNETES" not in caplog.text


def test_deletion_cost_follows_the_load_until_the_thread_is_stopped(api: Api) -> None:
    load = Load()
    cost = cost_of(api.server_port, load, period_s=0.02)
    cost.start()
    for load.value in (5, 6):
        api.received.clear()
        while api.costs[-1:] != [str(load.value)]:
            assert api.received.wait(60)
            api.received.clear()
    cost.stop()
