"""Tests of the process python -m rootstock_llm.services.gateway: signals, ports, exit codes and logs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.services.gateway.fakes import MODEL
from tests.services.gateway.gateway_process import Process
from tests.services.gateway.system import RawClient, System, chat_body, wait_until
from tests.services.ip_families import EVERYWHERE, LOOPBACKS

SECRET = "s3cr3t-prompt"
CHAT = "/v1/chat/completions"


@pytest.fixture
def launch(system: System) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*flags: str, **ports: int) -> Process:
        started.append(Process(system, *flags, **ports))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_gateway_process_serves_requests_and_stops_without_errors(launch: Callable[..., Process]) -> None:
    process = launch("--host", EVERYWHERE)
    process.wait_ready()
    for host in LOOPBACKS:
        with grpc.insecure_channel(f"{host}:{process.health_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            states = [stub.Check(health_pb2.HealthCheckRequest(service=name)).status for name in ("", "gateway")]
        assert states == [health_pb2.HealthCheckResponse.SERVING] * 2
        assert httpx.get(f"http://{host}:{process.port}/readiness").status_code == 200
    body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}
    url = f"http://127.0.0.1:{process.port}{CHAT}"
    answer = httpx.post(url, json=body)
    assert answer.status_code == 200
    assert httpx.post(url, json={**body, "temperature": SECRET}).status_code == 400
    seen = psutil.Process(process.pid)
    assert seen.memory_info().rss < 200 << 20 and seen.rlimit(psutil.RLIMIT_NOFILE) == (4096, 4096)
    process.terminate()
    code, log = process.wait()
    assert code == 0
    assert not [line for line in log if line["level"] in ("error", "critical") or "exception" in line]
    assert answer.headers["x-request-id"] in [line.get("request_id") for line in log]
    assert SECRET not in json.dumps(log)


def test_requests_in_flight_finish_within_the_grace_period(system: System, launch: Callable[..., Process]) -> None:
    process = launch("--grace-s", "20")
    process.wait_ready()
    system.do(lambda: system.worker.allow(3))
    client = RawClient(process, CHAT, chat_body(stream=True))
    client.read_until(b'l"}')  # the end of an event, which has more letters if the detokenizer was late
    process.terminate()
    wait_until(lambda: process._status("/health") == 0, "the closed port")
    system.do(lambda: system.worker.allow(None))
    client.read_until(b"data: [DONE]")
    assert process.wait()[0] == 0


def test_stream_ends_with_an_error_after_the_grace_period(system: System, launch: Callable[..., Process]) -> None:
    process = launch("--grace-s", "0.5")
    process.wait_ready()
    system.do(lambda: system.worker.allow(3))
    streaming = RawClient(process, CHAT, chat_body(stream=True))
    streaming.read_until(b'l"}')
    whole = RawClient(process, CHAT, chat_body())
    wait_until(lambda: len(system.worker.submits) == 2, "the second request")
    system.do(system.tokenizer.gate.clear)
    tokenizing = RawClient(process, CHAT, chat_body())
    wait_until(lambda: len(system.tokenizer.calls) == 3, "the third request")
    began = process.terminate()
    assert b'"code":"shutting_down"' in streaming.read_to_end_of_stream()
    for client in (whole, tokenizing):
        client.read_until(b'"code":"shutting_down"')
        assert client.received.startswith(b"HTTP/1.1 503 ")
    code, log = process.wait()
    assert code == 0 and time.monotonic() - began < 20, "the grace period is 0.5 seconds"
    assert not [line for line in log if "exception" in line]


@pytest.mark.parametrize("which", ["port", "health_port"])
def test_port_that_is_in_use_is_reported_in_one_line(launch: Callable[..., Process], which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = launch(**{which: port}).wait()
    assert code == 2
    problems = [line for line in log if line["level"] not in ("info", "debug")]
    assert len(problems) == 1 and str(port) in problems[0]["msg"] and "exception" not in problems[0]


def test_invalid_value_of_a_flag_is_reported_in_one_line() -> None:
    command = [sys.executable, "-m", "rootstock_llm.services.gateway", "--port", "99999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "port" in done.stderr
