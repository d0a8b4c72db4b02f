"""Tests of gRPC connections to slow servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.rpc import grpc_server

HOST = "127.0.0.1"
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # variables in which gRPC looks for a proxy


@asynccontextmanager
async def delaying_relay(port: int, by_s: float) -> AsyncIterator[int]:
    """Runs a TCP relay that delays the first bytes in each direction. Yields its port."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(by_s)
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_side = await asyncio.open_connection(HOST, port)
        await asyncio.gather(forward(reader, server_side[1]), forward(server_side[0], writer))

    async with await asyncio.start_server(connected, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("by_s", [0.0, 0.5])
def test_call_waits_for_a_slow_http2_greeting(by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call fails at once if its connection attempt fails, so the attempt must outlast the delay.

    The proxies in the environment are not running, so the call also fails if the channel uses them.
    """
    for name in PROXIES:
        monkeypatch.setenv(name, f"http://{HOST}:{free_ports(1)[0]}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def run() -> int:
        server = grpc.aio.server()
        health = grpc_server.HealthService("x")
        health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        async with delaying_relay(port, by_s) as slow, grpc_server.channel(f"{HOST}:{slow}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        await server.stop(None)
        return int(answer.status)

    assert asyncio.run(run()) == health_pb2.HealthCheckResponse.SERVING
