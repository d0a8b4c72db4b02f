"""Keeps a long-lived stream to one address alive for ever: session after session, with a bounded pause between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import grpc

from services.shared.observe.log_fields import fields
from services.shared.rpc.dialer import StaleChannel

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
TELL_S = 60.0  # between two lines about the same refusal
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED.name, grpc.StatusCode.PERMISSION_DENIED.name)  # how reasons of such begin


Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class Duplex(Protocol[Out, In]):
    """A bidirectional grpc.aio call, as far as it is used here; grpcio has no types of its own."""

    async def read(self) -> In | object:
        """The next message, or grpc.aio.EOF."""

    async def write(self, request: Out) -> None: ...

    def cancel(self) -> bool: ...


class LastTold:
    """What was told of a peer last: a refusal comes again with each try, and is told once a minute."""

    def __init__(self) -> None:
        self._reason, self._until = "", 0.0

    def is_news(self, reason: str, now: float) -> bool:
        """now: in seconds of any clock, the same each time."""
        if reason == self._reason and now < self._until:
            return False
        self._reason, self._until = reason, now + TELL_S
        return True


class StreamBroken(Exception):
    """The peer ended the stream, or broke its contract."""


async def keep_connected(service: str, address: str, session: Callable[[], Awaitable[None]]) -> None:
    """Runs `session` again whenever it ends. Sessions wait for the channel, so a peer that is down costs no polling."""
    loop = asyncio.get_running_loop()
    pause, told = FIRST_PAUSE_S, LastTold()
    while True:
        began = loop.time()
        reason = await _reason_of_end(session)
        if not reason.startswith(REFUSALS) or told.is_news(reason, loop.time()):
            logger.warning("stream ended: %s", reason, extra=fields(peer=service, address=address))
        if loop.time() - began > LONGEST_PAUSE_S:
            pause = FIRST_PAUSE_S
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def _reason_of_end(session: Callable[[], Awaitable[None]]) -> str:
    try:
        await session()
    except asyncio.CancelledError:
        # grpc.aio raises it too, when the peer ends a call with status CANCELLED.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return "cancelled by peer"
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except (StreamBroken, StaleChannel) as error:
        return str(error)
    except Exception:
        logger.exception("fault in a stream's session")
        return "fault"
    return "ended by peer"
