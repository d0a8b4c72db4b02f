"""Tests rootstock_llm.services.shared.rpc.probe against real servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.shared.rpc import grpc_server, probe


@pytest.fixture
def health_port() -> Iterator[int]:
    """Runs a health service that is live and not ready."""
    loop, (port,) = asyncio.new_event_loop(), free_ports(1)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(awaitable: object) -> object:
        return asyncio.run_coroutine_threadsafe(awaitable, loop).result(60)  # type: ignore[arg-type]

    server = run(grpc_server.start_server(HOST, port, grpc_server.HealthService("worker"), lambda server: None))
    assert isinstance(server, grpc_server.GrpcServer)
    yield port
    run(server.stop(0))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/?q")))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    server = HTTPServer((HOST, 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join(60)
    server.server_close()


def test_probe_distinguishes_liveness_and_readiness(health_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{HOST}:{health_port}"
    assert probe.main([target]) == 0
    assert probe.main([target, "--service", "worker"]) == 1
    assert capsys.readouterr().err == f"{target}: worker is NOT_SERVING\n"


def test_probe_fails_for_an_unknown_service(health_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main([f"{HOST}:{health_port}", "--service", "gateway"]) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_probe_fails_when_no_server_listens(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main([f"{scheme}{HOST}:{free_ports(1)[0]}"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_probe_fails_when_the_server_is_silent(scheme: str) -> None:
    with socket.create_server((HOST, 0)) as silent:
        assert probe.main([f"{scheme}{HOST}:{silent.getsockname()[1]}", "--timeout-s", "0.3"]) == 1


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (302, 0), (404, 1)])
def test_probe_accepts_the_same_http_statuses_as_the_kubelet(http_port: int, status: int, expected: int) -> None:
    assert probe.main([f"http://{HOST}:{http_port}/{status}?q"]) == expected


def test_probe_ignores_proxies_in_the_environment(http_port: int, health_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{HOST}:{free_ports(1)[0]}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert probe.main([f"http://{HOST}:{http_port}/200"]) == 0
    assert probe.main([f"{HOST}:{health_port}"]) == 0


def test_probe_exits_with_2_when_the_command_line_is_invalid() -> None:
    command = [sys.executable, "-m", "rootstock_llm.services.shared.rpc.probe"]
    assert subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 2
