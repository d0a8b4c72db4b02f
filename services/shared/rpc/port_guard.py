"""A gRPC port that takes only calls with the right certificate and token. Refused calls are counted and logged."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

from services.shared.observe.log_fields import fields
from services.shared.tls.mutual_tls import TOKEN_KEY, MutualTls
from services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

LOG_S = 60.0  # pause between two log lines about the same client
MAX_LOGGED = 1024  # clients that are remembered for this pause

Behavior = Callable[[Any, Any], Any]  # the implementation of a call: (request, context) → response


class PortGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Checks the certificate's role and the token of each call.

    gRPC itself refuses connections whose certificate another authority has signed. This interceptor must be the first one, so
    that refused calls do not count as open calls.
    """

    def __init__(self, mtls: MutualTls, *callers: Role) -> None:
        """Creates the guard.

        Args:
            callers: roles whose certificates may call.
        """
        self._mtls = mtls
        self._callers = frozenset(caller.value.encode() for caller in callers)
        self._log_at: dict[str, float] = {}  # time of the next log line by client host
        # A handler of the stream kind reads no message, so it fits calls of every kind.
        self._no_token = grpc.stream_stream_rpc_method_handler(self._refuse_token)

    def open(self, server: grpc.aio.Server, address: str) -> int:
        """Adds the port. Raises RuntimeError if it is taken."""
        return int(server.add_secure_port(address, self._mtls.server_credentials()))

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        tokens = self._mtls.tokens
        if tokens is not None and not tokens.accepts(_given(details.invocation_metadata)):
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
        """Logs a refusal, at most once in LOG_S per client host. The client's port differs between connections."""
        host = peer.rpartition(":")[0]
        now = time.monotonic()
        if now < self._log_at.get(host, 0.0):
            return
        if len(self._log_at) >= MAX_LOGGED:
            self._log_at.clear()
        self._log_at[host] = now + LOG_S
        logger.warning("call refused: %s", why, extra=fields(peer=host))


def _given(metadata: Any) -> bytes:
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
    return make(_behind(check, getattr(handler, name)), handler.request_deserializer, handler.response_serializer)


def _behind(check: Callable[[grpc.aio.ServicerContext], Awaitable[None]], behavior: Behavior) -> Behavior:
    """Wraps a behavior in a function of the same kind: a coroutine or an asynchronous generator. gRPC distinguishes them."""

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await check(context)
        return await behavior(request, context)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await check(context)
        async with contextlib.aclosing(behavior(request, context)) as answers:
            async for answer in answers:
                yield answer

    return stream if inspect.isasyncgenfunction(behavior) else call
