"""Which calls a gRPC server has not finished, so that it can stop after the last of them. Lives on the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

GOING_AWAY = "the server is shutting down"
HEALTH = "/grpc.health.v1.Health/"  # answers to the end; a watcher's call never ends by itself

Behavior = Callable[[Any, Any], Any]


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
        kinds = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        name = "_".join(kinds)
        make = getattr(grpc, f"{name}_rpc_method_handler")
        return make(self._counted(getattr(handler, name)), handler.request_deserializer, handler.response_serializer)

    def _counted(self, behavior: Behavior) -> Behavior:
        """As the handler is, a coroutine function or an asynchronous generator function: gRPC looks which."""

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._begin(context)
            return await behavior(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await self._begin(context)
            async with contextlib.aclosing(behavior(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return stream if inspect.isasyncgenfunction(behavior) else call

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
