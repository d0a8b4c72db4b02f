"""A gRPC port that takes only calls with the right certificate and token: who comes without is told so, counted and logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from services.shared.observe.log_fields import fields
from services.shared.rpc.checked_handler import checked
from services.shared.tls.mutual_tls import TOKEN_KEY, MutualTls
from services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

TELL_S = 60.0  # between two lines about the same peer
MOST_TOLD = 1024  # peers that are remembered for that


class PortGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """callers: whose certificates may call. The connection itself is refused by gRPC where a certificate is none of the
    authorities'. Before everything else that intercepts: what is refused is nobody's open call."""

    def __init__(self, mtls: MutualTls, *callers: Role) -> None:
        self._mtls = mtls
        self._callers = frozenset(caller.value.encode() for caller in callers)
        self._told: dict[str, float] = {}  # when, by peer
        self._no_token = grpc.stream_stream_rpc_method_handler(self._refuse_token)  # reads nothing, whatever the call's kind

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
            shown = ", ".join(name.decode(errors="replace") for name in names) or "nobody"
            wanted = " or ".join(sorted(caller.decode() for caller in self._callers))
            await self._refuse(
                context,
                "certificate",
                grpc.StatusCode.PERMISSION_DENIED,
                f"a certificate of {wanted} is wanted, this one is of {shown}",
            )

    async def _refuse_token(self, _request: object, context: grpc.aio.ServicerContext) -> NoReturn:
        names = context.auth_context().get("peer_dns", ())
        whose = ", ".join(name.decode(errors="replace") for name in names)
        await self._refuse(context, "token", grpc.StatusCode.UNAUTHENTICATED, f"{whose} has not sent the services' token")

    async def _refuse(self, context: grpc.aio.ServicerContext, reason: str, code: grpc.StatusCode, why: str) -> NoReturn:
        self._mtls.refused[reason] += 1
        self._tell(context.peer(), why)
        await context.abort(code, why)
        raise AssertionError("abort raises")

    def _tell(self, peer: str, why: str) -> None:
        """Once a minute for each address: ports differ from connection to connection."""
        host = peer.rpartition(":")[0]
        now = time.monotonic()
        if now < self._told.get(host, 0.0):
            return
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        self._told[host] = now + TELL_S
        logger.warning("a call is refused: %s", why, extra=fields(peer=host))


def _given(metadata: Any) -> bytes:
    for key, value in metadata or ():
        if key == TOKEN_KEY:
            return value if isinstance(value, bytes) else str(value).encode()
    return b""
