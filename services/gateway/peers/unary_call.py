"""Runs unary calls over channels that may be closed during the call, because discovery drops the address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from services.gateway.peers.reconnect import StreamBroken

T = TypeVar("T")


async def answer_of(call: Callable[[], Awaitable[T]]) -> T:
    """Returns the response of a unary call.

    Args:
        call: Begins the call.

    Raises:
        grpc.aio.AioRpcError: The call has failed.
        StreamBroken: The channel is closed. grpc.aio raises UsageError if this happens before the call, and CancelledError if it
            happens during the call, although the task is not cancelled.
    """
    try:
        return await call()
    except grpc.aio.UsageError as error:
        raise StreamBroken(str(error)) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StreamBroken("the channel is closed") from None
