"""Connections to workers, tokenizers and detokenizers: sessions of a stream, lost services, unary calls, and the served model.

When a session of a long-lived stream ends, a new session begins. A remote service counts as lost if it sends no message while a
message is due. Its process has then stopped or hangs, or its machine is unreachable. The state of the gRPC channel does not show
these faults.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.dialer import StaleChannel

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # seconds between two sessions; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 2.0
LOG_AGAIN_S = 60.0  # seconds between two log lines about the same refusal
# gRPC statuses of a refusal. The reason for the end of a refused session begins with one of these names.
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED.name, grpc.StatusCode.PERMISSION_DENIED.name)
# Number of checks for a new message within Patience.silence. The service is lost if all checks fail. One check is not enough: if
# this process was suspended, one check fails although the service works.
NUM_CHECKS = 5
CONNECT_ATTEMPTS = 3  # overlapping attempts to connect, because the first packet of an attempt may be lost
INFO_S = 2.0  # time limit of an Info call in seconds
ANY_MODEL = ""  # in place of a model id: any model

# After these errors of an Info call, the gateway calls Info again, because the replica is stopping, does not respond, or refuses
# the gateway. After any other error, the replica counts as serving any model.
_TEMPORARY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)

CountMessages = Callable[[], int | None]  # returns the number of received messages, or None while no message is due
T = TypeVar("T")
Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class Duplex(Protocol[Out, In]):
    """The methods of a bidirectional grpc.aio call that the gateway uses. Needed because grpcio has no type annotations."""

    async def read(self) -> In | object:
        """Returns the next message, or grpc.aio.EOF at the end."""

    async def write(self, request: Out) -> None: ...

    def cancel(self) -> bool: ...


class LogLimiter:
    """Limits the log lines about one service: the same reason is logged once in LOG_AGAIN_S."""

    def __init__(self) -> None:
        self._reason, self._until = "", 0.0

    def should_log(self, reason: str, now: float) -> bool:
        """Returns whether the caller must log a reason now. If so, the reason counts as logged.

        Args:
            now: Time in seconds. All calls must use the same clock.
        """
        if reason == self._reason and now < self._until:
            return False
        self._reason, self._until = reason, now + LOG_AGAIN_S
        return True


class StreamBroken(Exception):
    """The remote service has ended the stream or violated the protocol. The stream needs a new session."""


async def keep_connected(service: str, address: str, session: Callable[[], Awaitable[None]]) -> None:
    """Runs one session after another until cancelled.

    Args:
        session: Runs one session. A session waits until its channel is connected, so that an unreachable service is not polled.
    """
    loop = asyncio.get_running_loop()
    pause, limiter = FIRST_PAUSE_S, LogLimiter()
    while True:
        began = loop.time()
        reason = await _reason_of_end(session)
        if not reason.startswith(REFUSALS) or limiter.should_log(reason, loop.time()):
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


async def response_of(call: Callable[[], Awaitable[T]]) -> T:
    """Returns the response of a unary call.

    Args:
        call: Begins the call.

    Raises:
        grpc.aio.AioRpcError: The call has failed.
        StreamBroken: The channel was closed before the call (UsageError of grpc.aio) or during the call (CancelledError of
            grpc.aio, although the task is not cancelled).
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


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for which a due message may be missing before a remote service counts as lost."""

    silence: float  # limit, whatever the cause
    # Limit if the machine also accepts no TCP connection; 0: no connection is tried. It may be shorter than `silence`: the kernel
    # of a reachable machine accepts connections even if the process gets no CPU time.
    unreachable: float


async def until_lost(address: str, patience: Patience, count: CountMessages, count_urgent: CountMessages | None = None) -> str:
    """Waits until a remote service is lost, and returns the reason.

    Args:
        count: Counts messages for Patience.silence.
        count_urgent: Counts messages for Patience.unreachable. They are due only while a request waits for the service, so that
            no connection is tried at other times. Default: `count`.
    """
    silent = asyncio.create_task(until_silent(patience.silence, count))
    tasks = {silent, asyncio.create_task(until_unreachable(address, patience.unreachable, count_urgent or count))}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()  # raises the exception of a check that has failed itself, because the service is then not lost
    if silent in done:
        return f"silent for {patience.silence:g} s"
    return f"silent for {patience.unreachable:g} s, and accepts no connection"


async def until_silent(silence_s: float, count: CountMessages) -> None:
    """Returns when no message has arrived for `silence_s` seconds while a message was due."""
    before, silent = count(), 0
    while silent < NUM_CHECKS:
        await asyncio.sleep(silence_s / NUM_CHECKS)
        now = count()
        silent = silent + 1 if now is not None and now == before else 0
        before = now


async def until_unreachable(address: str, within_s: float, count: CountMessages) -> None:
    """Returns when a machine is unreachable, for example because it has no power or its network is down.

    A machine is unreachable if no message arrives for `within_s` seconds while a message is due. In addition, no connection could
    be opened in the last two thirds of that time. If `within_s` is 0, the function never returns.
    """
    while not within_s:
        await asyncio.sleep(3600)
    while True:
        before = count()
        await asyncio.sleep(within_s / 3)
        if before is None or count() != before:
            continue
        if not await _is_reachable(address, 2 * within_s / 3) and count() == before:
            return


async def _is_reachable(address: str, within_s: float) -> bool:
    """Returns whether the machine accepts or refuses a connection. Also True if this process was suspended during the test."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    attempts = {asyncio.create_task(_try_connect(address, at * within_s / CONNECT_ATTEMPTS)) for at in range(CONNECT_ATTEMPTS)}
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for ended in asyncio.as_completed(attempts):
                    if await ended:
                        return True
                await asyncio.sleep(begun + within_s - clock())  # all attempts have failed at once, for example without a route
    finally:
        for attempt in attempts:
            attempt.cancel()
    return clock() - begun > 1.1 * within_s


async def _try_connect(address: str, after_s: float) -> bool:
    await asyncio.sleep(after_s)
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionError:
        return True  # a refusal shows that the machine is reachable
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


class Info(Protocol):
    model: str


Answer = TypeVar("Answer", bound=Info)


async def request_info(info: Callable[[], Awaitable[Answer]], address: str) -> Answer | None:
    """Returns a replica's response to Info.

    Args:
        info: Begins the Info call.

    Returns:
        None if the replica does not report its model.

    Raises:
        StreamBroken: The call has failed with a temporary error. The caller tries again.
    """
    try:
        return await response_of(info)
    except grpc.aio.AioRpcError as error:
        if error.code() in _TEMPORARY:
            raise StreamBroken(f"no response to Info: {error.code().name}: {error.details()}") from None
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            logger.warning("a replica does not report its model", extra=fields(address=address, code=error.code().name))
        return None


def serves_model(offered: str, wanted: str) -> bool:
    """Returns whether a replica of the model `offered` can serve requests for the model `wanted`. Either may be ANY_MODEL."""
    return offered == wanted or ANY_MODEL in (offered, wanted)
