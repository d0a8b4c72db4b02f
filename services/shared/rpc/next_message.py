"""Reading a stream of a service that may be stopping: what was sent before is read, and then the stream ends."""

from __future__ import annotations

import asyncio
import time
from typing import Generic, TypeVar

import grpc

GOING_AWAY = "the service is going away"
DRAIN_QUIET_S = 0.02  # without a message, while stopping: nothing more was on its way
DRAIN_S = 0.2  # of reading on, while stopping

Message = TypeVar("Message")


class GoingAway(Exception):
    """The service stops, and has read what was on its way."""


class Reading(Generic[Message]):
    """One stream's messages. close() when the stream has ended."""

    def __init__(self, context: grpc.aio.ServicerContext, stopping: asyncio.Event) -> None:
        self._context = context
        self._last = asyncio.create_task(_last_read(stopping))

    async def next(self) -> Message | None:
        """None at the end of the stream. Raises GoingAway."""
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
    """Returns when the service stops: until when (time.monotonic) messages that were sent before may still come in."""
    await stopping.wait()
    return time.monotonic() + DRAIN_S
