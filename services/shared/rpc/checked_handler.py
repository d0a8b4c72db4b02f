"""A handler of a gRPC call that something comes before, whatever the call's kind."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

Behavior = Callable[[Any, Any], Any]


def checked(
    handler: grpc.RpcMethodHandler, check: Callable[[grpc.aio.ServicerContext], Awaitable[None]]
) -> grpc.RpcMethodHandler:
    """check: raises what ends the call."""
    kinds = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    name = "_".join(kinds)
    make = getattr(grpc, f"{name}_rpc_method_handler")
    return make(_behind(check, getattr(handler, name)), handler.request_deserializer, handler.response_serializer)


def _behind(check: Callable[[grpc.aio.ServicerContext], Awaitable[None]], behavior: Behavior) -> Behavior:
    """As the handler is, a coroutine function or an asynchronous generator function: gRPC looks which."""

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await check(context)
        return await behavior(request, context)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await check(context)
        async with contextlib.aclosing(behavior(request, context)) as answers:
            async for answer in answers:
                yield answer

    return stream if inspect.isasyncgenfunction(behavior) else call
