"""gRPC as every service uses it: channel and server options, health, and serving until a signal with a grace period."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from services.shared.limits import MAX_MESSAGE_BYTES
from services.shared.rpc.open_calls import OpenCalls
from services.shared.rpc.port_guard import PortGuard

CLOSE_S = 1.0  # for connections to close, beside what is left of the grace period
ENDED = 128 + signal.SIGTERM  # status of who is ended by it, as shells have it
LIVENESS = ""  # health service name of the process itself; the service's own name means readiness

logger = logging.getLogger(__name__)

_MESSAGE_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [
    *_MESSAGE_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second process on the same port is told so, instead of sharing it
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
# A peer that vanished without closing is noticed within about 20 s; reconnects come quickly and stay bounded. The least backoff
# is also what an attempt may take, handshakes included; behind a refusal the next one does not wait for it.
CHANNEL_OPTIONS = [
    *_MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # what the environment names is for the world outside
]


def channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)


class Health:
    """The standard health service. Liveness ("") is SERVING from the start; readiness (the service's name) when told."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.servicer = health_aio.HealthServicer()

    async def start(self) -> None:
        await self.servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        state = health_pb2.HealthCheckResponse
        await self.servicer.set(self._service, state.SERVING if ready else state.NOT_SERVING)

    async def set_live(self, live: bool) -> None:
        state = health_pb2.HealthCheckResponse
        await self.servicer.set(LIVENESS, state.SERVING if live else state.NOT_SERVING)


class Server:
    """A started gRPC server that can end without losing an answer."""

    def __init__(self, server: grpc.aio.Server, health: Health, calls: OpenCalls) -> None:
        self._server, self._health, self._calls = server, health, calls

    async def stop(self, grace_s: float | None) -> None:
        """At once: calls in flight get `grace_s`. Their answers may be lost with their connections; serve_until() loses none."""
        await self._server.stop(grace_s)

    async def serve_until(self, stop: asyncio.Event, grace_s: float, drain: Callable[[], Awaitable[None]]) -> None:
        """Serves until `stop` is set; then not ready, drain, and at most grace_s seconds for calls in flight.

        gRPC closes a connection that it has said goodbye on as soon as its last call is over on this side. What the client says
        then (that it has made room, say) is answered by the kernel with a reset, which takes the rest of a large answer with it.
        So goodbye is said when no call is left: it has a ping in it, whose reply comes after the client has read all before it.
        """
        await stop.wait()
        logger.info("stopping")
        await self._health.set_ready(False)
        await drain()
        self._calls.close()
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._calls.wait_none()
        left = grace_s - (asyncio.get_running_loop().time() - began)
        await self._server.stop(max(left, CLOSE_S))


async def start_server(
    host: str,
    port: int,
    health: Health,
    add: Callable[[grpc.aio.Server], None],
    max_connection_age_s: float = 0.0,
    guard: PortGuard | None = None,
) -> Server:
    """A started server with the health service and whatever `add` registers. Raises RuntimeError if the port is taken.

    max_connection_age_s: connections get no new calls after so long, calls in flight end as they are; 0: never. guard: who may
    call, over TLS; None: anybody, in the clear.
    """
    ages = [("grpc.max_connection_age_ms", round(max_connection_age_s * 1000))] if max_connection_age_s else []
    calls = OpenCalls()
    guards = () if guard is None else (guard,)
    server = grpc.aio.server(interceptors=(*guards, calls), options=[*SERVER_OPTIONS, *ages])
    add(server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    open_port(server, host, port, guard)
    await health.start()
    await server.start()
    logger.info("listening on %s:%d%s", host, port, "" if guard is None else " with TLS")
    return Server(server, health, calls)


def open_port(server: grpc.aio.Server, host: str, port: int, guard: PortGuard | None) -> int:
    """The port that it is: 0 takes a free one. host: "::" is every address, IPv4 too. Raises RuntimeError if it is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return int(server.add_insecure_port(address)) if guard is None else guard.open(server, address)


async def start_probe_port(host: str, port: int, health: Health) -> grpc.aio.Server | None:
    """A started server of the health service alone, in the clear; None for port 0. Raises RuntimeError if the port is taken."""
    if not port:
        return None
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    open_port(server, host, port, None)
    await server.start()
    return server


def end_on_signal() -> None:
    """For what comes before stop_signal(): SIGTERM ends the process at once. A container's first process is not ended by it
    otherwise, and what loads a model for minutes would keep its device for as long."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ENDED))


def stop_signal() -> asyncio.Event:
    """Set when SIGTERM or SIGINT has arrived. A server is given its first call only after this: until then a signal kills."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    return stop
