"""Keeps a long-lived stream to one address up by starting a new session after each end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import grpc

from services.shared.observe.log_fields import fields
from services.shared.rpc.dialer import StaleChannel

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # seconds between two sessions; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 2.0
TELL_S = 60.0  # seconds between two log lines about the same refusal
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED.name, grpc.StatusCode.PERMISSION_DENIED.name)  # first words of a refusal's reason


Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class Duplex(Protocol[Out, In]):
    """The methods of a bidirectional grpc.aio call that the gateway uses. grpcio has no type annotations."""

    async def read(self) -> In | object:
        """Returns the next message, or grpc.aio.EOF at the end."""

    async def write(self, request: Out) -> None: ...

    def cancel(self) -> bool: ...


class LastTold:
    """Limits the log lines about one service's refusals. The same reason is logged once in TELL_S."""

    def __init__(self) -> None:
        self._reason, self._until = "", 0.0

    def is_news(self, reason: str, now: float) -> bool:
        """Returns whether a reason is to be logged now, and counts it as logged.

        Args:
            now: Seconds of a clock, which is the same in every call.
        """
        if reason == self._reason and now < self._until:
            return False
        self._reason, self._until = reason, now + TELL_S
        return True


class StreamBroken(Exception):
    """The remote service has ended the stream or violated the protocol. The stream needs a new session."""


async def keep_connected(service: str, address: str, session: Callable[[], Awaitable[None]]) -> None:
    """Runs sessions until cancelled. A session waits for its channel, so that an unreachable service is not polled."""
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
        # grpc.aio also raises CancelledError if the remote service ends a call with status CANCELLED.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return "cancelled by the remote service"
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except (StreamBroken, StaleChannel) as error:
        return str(error)
    except Exception:
        logger.exception("fault in a stream's session")
        return "fault"
    return "ended by the remote service"
