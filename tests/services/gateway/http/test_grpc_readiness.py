"""Tests of a gateway's readiness, over gRPC and HTTP."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.services.gateway.system import wait_until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


LISTED = ("--models", "sleeping")


@contextmanager
def gateway_alone(port: int, health_port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "rootstock_llm.services.gateway", "--port", str(port), "--health-port", str(health_port)]
    command += [f"--{peers}={HOST}:{free_ports(1)[0]}" for peers in ("workers", "tokenizers", "detokenizers")]
    process = subprocess.Popen([*command, *flags, "--grace-s", "30"], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def state(health_port: int, service: str) -> int:
    with grpc.insecure_channel(f"{HOST}:{health_port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status)
        except grpc.RpcError:
            return -1


@contextmanager
def open_request(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), 10) as client:
        body = b'{"model":"sleeping","prompt":[1,2,3]}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        in_flight = "rootstock_gateway_requests_in_flight 1.0"
        wait_until(lambda: in_flight in httpx.get(f"http://{HOST}:{port}/metrics").text, "the request in flight")
        yield client


def test_grpc_readiness_does_not_depend_on_other_services_and_ends_when_the_gateway_stops() -> None:
    port, health_port = free_ports(2)
    with gateway_alone(port, health_port, *LISTED) as process:
        wait_until(lambda: state(health_port, "gateway") == SERVING, "readiness")
        assert state(health_port, "") == SERVING
        answer = httpx.get(f"http://{HOST}:{port}/readiness")
        assert answer.status_code == 503
        assert sorted(answer.json()["missing"]) == ["detokenizer", "tokenizer", "worker"]
        with open_request(port):  # the open request prolongs the drain
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: state(health_port, "gateway") == NOT_SERVING, "the end of readiness")
            assert state(health_port, "") == SERVING


def ready(client: httpx.Client) -> tuple[int, list[str], str | None]:
    """Returns the status of GET /ready, its list `missing`, and its header `connection` (None if absent)."""
    answer = client.get("/ready")
    return answer.status_code, answer.json()["missing"], answer.headers.get("connection")


def test_readiness_ends_before_the_port_closes() -> None:
    port, health_port = free_ports(2)
    with gateway_alone(port, health_port, *LISTED, "--stop-delay-s", "7", "--queue-timeout-s", "5") as process:
        wait_until(lambda: state(health_port, "gateway") == SERVING, "readiness")
        with httpx.Client(base_url=f"http://{HOST}:{port}") as client:
            assert ready(client) == (200, [], None)
            with open_request(port) as waiting:
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: ready(client) == (503, ["stopping"], "close"), "the refusal")
                assert state(health_port, "gateway") == NOT_SERVING
                assert client.get("/v1/models").status_code == 200  # a client that has not noticed the stop is served
                answer = waiting.recv(65536).lower()  # this request was open before the stop; its connection closes, too
            assert answer.startswith(b"http/1.1 503") and b"\r\nconnection: close\r\n" in answer
        assert process.wait(60) == 0


def test_readiness_route_returns_503_when_no_model_is_known() -> None:
    port, health_port = free_ports(2)
    with gateway_alone(port, health_port):
        wait_until(lambda: state(health_port, "gateway") == SERVING, "readiness")
        with httpx.Client(base_url=f"http://{HOST}:{port}") as client:
            assert ready(client) == (503, ["model"], None)
