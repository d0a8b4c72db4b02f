"""The gRPC server of every service: options, health, caller checks, the count of open calls, stream reading, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from rootstock_llm.services.shared.limits import MAX_MESSAGE_BYTES
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.tls.mutual_tls import TOKEN_KEY, MutualTls
from rootstock_llm.services.shared.tls.roles import Role

CLOSE_S = 1.0  # seconds that connections get to close, even if the grace period has passed
TERMINATED = 128 + signal.SIGTERM  # exit status after SIGTERM, by the shells' convention
SHUTTING_DOWN = "the server is shutting down"  # error message of a call that arrives after the drain
GOING_AWAY = "the service is going away"  # error message of a stream that a stopping service ends
DRAIN_QUIET_S = 0.02  # time without a message after which a stopping service ends a stream
DRAIN_S = 0.2  # longest time that a stopping service reads a stream
HEALTH = "/grpc.health.v1.Health/"  # prefix of the health service's methods
LIVENESS = ""  # name under which the health service reports liveness; it reports readiness under the service's name
LOG_S = 60.0  # pause between two log lines about the same refused client
MAX_LOGGED = 1024  # largest number of refused clients whose next log time is stored

Behavior = Callable[[Any, Any], Any]  # the implementation of a call: (request, context) → response
Message = TypeVar("Message")

logger = logging.getLogger(__name__)

_MESSAGE_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [
    *_MESSAGE_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second process on the same port fails instead of sharing it
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
# Keepalive detects a vanished server within about 20 s. min_reconnect_backoff_ms is also the time limit of a connection attempt
# with its handshakes. It does not delay the next attempt if the server refuses a connection.
CHANNEL_OPTIONS = [
    *_MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # proxies in the environment are for external hosts
]


def channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)


class HealthService:
    """The standard gRPC health service. After start(), liveness is SERVING and readiness NOT_SERVING; the setters change them."""

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


class PortGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Checks the role in the caller's certificate and, if the services share a token, the token of each call.

    gRPC itself refuses connections whose certificate no trusted authority has signed. This interceptor must be the first one, so
    that refused calls do not count as open calls.
    """

    def __init__(self, mtls: MutualTls, *callers: Role) -> None:
        """Creates the guard.

        Args:
            callers: roles whose certificates may call.
        """
        self._mtls = mtls
        self._callers = frozenset(caller.value.encode() for caller in callers)
        self._log_at: dict[str, float] = {}  # by client host: value of time.monotonic() from which it is logged again
        # gRPC calls a stream-stream handler before it reads a message, so this handler can refuse calls of every kind.
        self._no_token = grpc.stream_stream_rpc_method_handler(self._refuse_token)

    def open(self, server: grpc.aio.Server, address: str) -> int:
        """Adds a TLS port to the server and returns its number. Raises RuntimeError if the port is taken."""
        return int(server.add_secure_port(address, self._mtls.server_credentials()))

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        tokens = self._mtls.tokens
        if tokens is not None and not tokens.accepts(_token_in(details.invocation_metadata)):
            return self._no_token
        handler = await continuation(details)
        return handler if handler is None else checked(handler, self._check)

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        names = context.auth_context().get("peer_dns", ())
        if self._callers.isdisjoint(names):
            shown = ", ".join(name.decode(errors="replace") for name in names) or "nothing"
            wanted = " or ".join(sorted(caller.decode() for caller in self._callers))
            await self._refuse(
                context,
                "certificate",
                grpc.StatusCode.PERMISSION_DENIED,
                f"the caller's certificate must name {wanted}, but it names {shown}",
            )

    async def _refuse_token(self, _request: object, context: grpc.aio.ServicerContext) -> NoReturn:
        names = context.auth_context().get("peer_dns", ())
        caller = ", ".join(name.decode(errors="replace") for name in names)
        await self._refuse(context, "token", grpc.StatusCode.UNAUTHENTICATED, f"{caller} has not sent the services' token")

    async def _refuse(self, context: grpc.aio.ServicerContext, reason: str, code: grpc.StatusCode, why: str) -> NoReturn:
        self._mtls.refused[reason] += 1
        self._log(context.peer(), why)
        await context.abort(code, why)
        raise AssertionError("abort raises")

    def _log(self, peer: str, why: str) -> None:
        """Logs a refusal, at most once in LOG_S per client host. Ignores the client's port, which differs between connections."""
        host = peer.rpartition(":")[0]
        now = time.monotonic()
        if now < self._log_at.get(host, 0.0):
            return
        if len(self._log_at) >= MAX_LOGGED:
            self._log_at.clear()
        self._log_at[host] = now + LOG_S
        logger.warning("call refused: %s", why, extra=fields(peer=host))


def _token_in(metadata: Any) -> bytes:
    for key, value in metadata or ():
        if key == TOKEN_KEY:
            return value if isinstance(value, bytes) else str(value).encode()
    return b""


def checked(
    handler: grpc.RpcMethodHandler, check: Callable[[grpc.aio.ServicerContext], Awaitable[None]]
) -> grpc.RpcMethodHandler:
    """Returns a handler that awaits `check` before the call, for calls of every kind. `check` aborts the call to refuse it."""
    kinds = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    name = "_".join(kinds)
    make = getattr(grpc, f"{name}_rpc_method_handler")
    return make(_with_check(check, getattr(handler, name)), handler.request_deserializer, handler.response_serializer)


def _with_check(check: Callable[[grpc.aio.ServicerContext], Awaitable[None]], behavior: Behavior) -> Behavior:
    """Returns a function that awaits `check` and then runs `behavior`.

    The function is a coroutine function or an asynchronous generator function, as `behavior` is, because gRPC distinguishes the
    two.
    """

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await check(context)
        return await behavior(request, context)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await check(context)
        async with contextlib.aclosing(behavior(request, context)) as responses:
            async for response in responses:
                yield response

    return stream if inspect.isasyncgenfunction(behavior) else call


class OpenCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Counts calls from their arrival until gRPC has written their status, so that the server can stop after the last one.

    Calls of the health service are not counted: it serves until the server stops, and a Watch call never ends by itself. Belongs
    to the server's event loop.
    """

    def __init__(self) -> None:
        self._open = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def close(self) -> None:
        """Makes all later calls fail with UNAVAILABLE."""
        self._closed = True

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or details.method.startswith(HEALTH):
            return handler
        return checked(handler, self._begin)

    async def _begin(self, context: grpc.aio.ServicerContext) -> None:
        """Counts a call. Aborts it if close() was called before."""
        if self._closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        self._open += 1
        self._idle.clear()
        context.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()


class GrpcServer:
    """A started gRPC server that can stop without losing a response."""

    def __init__(self, server: grpc.aio.Server, health: HealthService, calls: OpenCalls) -> None:
        self._server, self._health, self._calls = server, health, calls

    async def stop(self, grace_s: float | None) -> None:
        """Stops accepting calls and gives running calls `grace_s` seconds. If `grace_s` is None, running calls end immediately.

        Unlike serve_until(), this method may lose responses.
        """
        await self._server.stop(grace_s)

    async def serve_until(self, stop: asyncio.Event, grace_s: float, drain: Callable[[], Awaitable[None]]) -> None:
        """Serves until `stop` is set, then becomes not ready, drains, and waits for running calls.

        The server sends GOAWAY only when no call is left, or when grace_s seconds have passed. In the second case, running calls
        get CLOSE_S more seconds. If GOAWAY came earlier, gRPC would close the connection right after the last call ends. A later
        frame of the client (such as WINDOW_UPDATE) would then make the kernel reset the connection, and the unread rest of a
        large response would be lost. When no call is left, the ping in GOAWAY delays the close until the client has read
        everything that was sent before the ping.
        """
        await stop.wait()
        logger.info("stopping")
        await self._health.set_ready(False)
        await drain()
        self._calls.close()
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._calls.wait_idle()
        left = grace_s - (asyncio.get_running_loop().time() - began)
        await self._server.stop(max(left, CLOSE_S))


async def start_server(
    host: str,
    port: int,
    health: HealthService,
    add: Callable[[grpc.aio.Server], None],
    max_connection_age_s: float = 0.0,
    guard: PortGuard | None = None,
) -> GrpcServer:
    """Starts a server with the health service and the services that `add` registers.

    Args:
        max_connection_age_s: age at which a connection takes no new calls; running calls continue. 0: never.
        guard: requires TLS and checks callers; None: the port has no TLS and accepts every call.

    Raises:
        RuntimeError: the port is taken.
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
    return GrpcServer(server, health, calls)


def open_port(server: grpc.aio.Server, host: str, port: int, guard: PortGuard | None) -> int:
    """Adds a port to a server and returns its number. Raises RuntimeError if the port is taken.

    Args:
        host: listen address; "::" is every address, also IPv4.
        port: 0 takes a free port.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return int(server.add_insecure_port(address)) if guard is None else guard.open(server, address)


async def start_probe_port(host: str, port: int, health: HealthService) -> grpc.aio.Server | None:
    """Starts a server with only the health service and without TLS. Raises RuntimeError if the port is taken.

    Returns:
        None for port 0.
    """
    if not port:
        return None
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    open_port(server, host, port, None)
    await server.start()
    return server


def end_on_signal() -> None:
    """Makes SIGTERM end the process immediately, until stop_signal() is called.

    The kernel ignores SIGTERM for a container's first process unless that process has a handler. Without a handler, a worker that
    loads a model would occupy its device for minutes after SIGTERM.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))


def stop_signal() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set. The caller must call this before the server accepts calls."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    return stop


class GoingAway(Exception):
    """The service stops and has read the messages in transit. The handler must end the stream."""


class MessageReader(Generic[Message]):
    """The messages of one stream, until the client ends it or the service stops.

    When the service stops, messages that the client has already sent are still read. The handler creates the reader and must
    call close() at the end of the stream.
    """

    def __init__(self, context: grpc.aio.ServicerContext, stopping: asyncio.Event) -> None:
        self._context = context
        self._deadline = asyncio.create_task(_drain_deadline(stopping))  # ends when the service stops

    async def next(self) -> Message | None:
        """Returns the next message, or None at the end of the stream. Raises GoingAway if the service stops."""
        read = asyncio.ensure_future(self._context.read())
        try:
            await asyncio.wait([read, self._deadline], return_when=asyncio.FIRST_COMPLETED)
            if not read.done() and time.monotonic() < self._deadline.result():
                await asyncio.wait([read], timeout=DRAIN_QUIET_S)
            if not read.done():
                raise GoingAway
            message = read.result()
            return None if message is grpc.aio.EOF else message
        finally:
            read.cancel()

    def close(self) -> None:
        self._deadline.cancel()


async def _drain_deadline(stopping: asyncio.Event) -> float:
    """Waits until the service stops. Returns the time (time.monotonic) until which messages are still read."""
    await stopping.wait()
    return time.monotonic() + DRAIN_S
