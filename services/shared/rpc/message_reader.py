"""Reads the messages of a gRPC stream until the client ends it or the service stops.

When the service stops, messages that the client has already sent are still read.
"""

from __future__ import annotations

import asyncio
import time
from typing import Generic, TypeVar

import grpc

GOING_AWAY = "the service is going away"
DRAIN_QUIET_S = 0.02  # time without a message after which a stopping service ends a stream
DRAIN_S = 0.2  # longest time that a stopping service reads a stream

Message = TypeVar("Message")


class GoingAway(Exception):
    """The service stops and has read the messages in transit. The handler must end the stream."""


class MessageReader(Generic[Message]):
    """The messages of one stream. The handler creates it and must call close() at the end of the stream."""

    def __init__(self, context: grpc.aio.ServicerContext, stopping: asyncio.Event) -> None:
        self._context = context
        self._last = asyncio.create_task(_last_read(stopping))

    async def next(self) -> Message | None:
        """Returns the next message, or None at the end of the stream. Raises GoingAway if the service stops."""
        read = asyncio.ensure_future(self._context.read())
        try:
            await asyncio.wait([read, self._last], return_when=asyncio.FIRST_COMPLETED)
            if not read.done() and time.monotonic() < self._last.result():
                await asyncio.wait([read], timeout=DRAIN_QUIET_S)
            if not read.done():
                raise GoingAway
            message = read.result()
            return None if message is grpc.aio.EOF else message
        finally:
            read.cancel()

    def close(self) -> None:
        self._last.cancel()


async def _last_read(stopping: asyncio.Event) -> float:
    """Waits until the service stops. Returns the time (time.monotonic) until which messages are still read."""
    await stopping.wait()
    return time.monotonic() + DRAIN_S
