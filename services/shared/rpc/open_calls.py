"""Which calls a gRPC server has not finished, so that it can stop after the last of them. Lives on the server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.shared.rpc.checked_handler import checked

GOING_AWAY = "the server is shutting down"
HEALTH = "/grpc.health.v1.Health/"  # answers to the end; a watcher's call never ends by itself


class OpenCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Calls from their arrival until gRPC has written their status. All but the health service's are counted."""

    def __init__(self) -> None:
        self._open = 0
        self._closed = False
        self._none = asyncio.Event()
        self._none.set()

    def close(self) -> None:
        """What arrives from here on is refused with UNAVAILABLE."""
        self._closed = True

    async def wait_none(self) -> None:
        await self._none.wait()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or details.method.startswith(HEALTH):
            return handler
        return checked(handler, self._begin)

    async def _begin(self, context: grpc.aio.ServicerContext) -> None:
        """Raises what ends a call that comes too late."""
        if self._closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, GOING_AWAY)
        self._open += 1
        self._none.clear()
        context.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        self._open -= 1
        if not self._open:
            self._none.set()
