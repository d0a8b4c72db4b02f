"""A gRPC port that accepts only calls with the control token. It refuses other calls without parsing their message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.rpc.control_token import accepts
from rootstock_llm.services.shared.rpc.grpc_server import PortGuard

METADATA_KEY = "authorization"


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Checks the control token of each call. All calls of the service must be unary."""

    def __init__(self, token: str) -> None:
        """Creates the check. An empty token accepts every call."""
        self._token = token
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if accepts(self._token, _authorization_in(handler_call_details.invocation_metadata)):
            return await continuation(handler_call_details)
        return self._refusal


async def start_guarded_server(
    host: str, port: int, token: str, add: Callable[[grpc.aio.Server], None], guard: PortGuard | None = None
) -> tuple[grpc.aio.Server, int]:
    """Starts a server with the services that `add` registers. Returns the server and its port.

    Args:
        port: 0 takes a free port.
        token: the control token; "" accepts every call.
        guard: as in grpc_server.start_server().

    Raises:
        RuntimeError: the port is taken.
    """
    guards = () if guard is None else (guard,)
    server = grpc.aio.server(interceptors=(*guards, TokenCheck(token)), options=grpc_server.SERVER_OPTIONS)
    add(server)
    bound = grpc_server.open_port(server, host, port, guard)
    await server.start()
    return server, bound


def _authorization_in(metadata: Any) -> bytes:
    for key, value in metadata or ():
        if key == METADATA_KEY:
            return value if isinstance(value, bytes) else str(value).encode()
    return b""


async def _refuse(request: bytes, context: grpc.aio.ServicerContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token is required, as 'authorization: Bearer TOKEN'")
    raise AssertionError("abort raises")
