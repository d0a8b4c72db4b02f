"""A unary call over a channel that may be closed meanwhile, as when discovery lets its peer go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from services.gateway.peers.reconnect import StreamBroken

T = TypeVar("T")


async def answer_of(call: Callable[[], Awaitable[T]]) -> T:
    """call: begins it. Raises grpc.aio.AioRpcError as it does, and StreamBroken where the channel has been closed: to grpc.aio
    that is a wrong use before the call, and in the middle of it a cancellation, which nobody has asked for."""
    try:
        return await call()
    except grpc.aio.UsageError as error:
        raise StreamBroken(str(error)) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StreamBroken("the channel is closed") from None
