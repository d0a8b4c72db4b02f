"""Refuses calls that do not carry the operators' token, before anything of them is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from services.shared.control_token import accepts

METADATA_KEY = "authorization"


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """For services whose calls are all unary. token: "" lets every call in."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if accepts(self._token, _given(handler_call_details.invocation_metadata)):
            return await continuation(handler_call_details)
        return self._refusal


def _given(metadata: Any) -> bytes:
    for key, value in metadata or ():
        if key == METADATA_KEY:
            return value if isinstance(value, bytes) else str(value).encode()
    return b""


async def _refuse(request: bytes, context: grpc.aio.ServicerContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token is required, as 'authorization: Bearer TOKEN'")
    raise AssertionError("abort raises")
