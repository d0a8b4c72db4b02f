"""Reads an HTTP request's body with limits that hold while reading, whatever the headers say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive, Scope

from services.gateway.config.settings import GatewaySettings
from services.gateway.request.bodies import ReceivedBody
from services.gateway.request.body_budget import BodyBudget, ClientGone, Gone, HeldBytes, body_too_large, hold_values
from services.gateway.request.errors import CLIENT_CLOSED, ApiError, unavailable
from services.shared import limits
from services.shared.limits import BODY_STEP_BYTES, SMALL_BODY_BYTES

# Of a scope's extensions, each to be called.
GONE = "rootstock.gone"  # returns when the client has closed its connection
WATCH = "rootstock.watch"  # given a callback for when it is closed, returns one that takes this back
CUT = "rootstock.cut"  # ends the connection at once, and what is written with it


def gone_of(scope: Scope) -> Gone:
    """Never returns under a server that does not know."""
    found: Gone = scope.get("extensions", {}).get(GONE, asyncio.Event().wait)
    return found


def watch(scope: Scope, receive: Receive, on_gone: Callable[[], None]) -> Callable[[], None]:
    """Until what it returns is called, on_gone is called once the client has closed its connection. The body has been read."""
    found = scope.get("extensions", {}).get(WATCH)
    if found is not None:
        stop: Callable[[], None] = found(on_gone)
        return stop
    watching = asyncio.create_task(_until_gone(receive))
    watching.add_done_callback(lambda task: None if task.cancelled() else on_gone())

    def stop_watching() -> None:
        watching.cancel()

    return stop_watching


class ClientWatch:
    """Cancels the task in a `with` block once the client has closed its connection. The block then raises ClientGone."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._stop: Callable[[], None] | None = None
        self._left = False

    def start(self) -> None:
        """Begins to watch, for the current task. The body must have been read."""
        self._task = asyncio.current_task()
        self._stop = watch(self._scope, self._receive, self._leave)

    def __enter__(self) -> ClientWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._stop is not None:
            self._stop()
        if self._left and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise ClientGone from None

    def _leave(self) -> None:
        assert self._task is not None
        self._left = True
        self._task.cancel()


def attended(scope: Scope, receive: Receive) -> ClientWatch:
    """Returns a watch that has begun, for the current task's `with` block. The body must have been read."""
    client = ClientWatch(scope, receive)
    client.start()
    return client


def cut(scope: Scope) -> None:
    found = scope.get("extensions", {}).get(CUT)
    if found is not None:
        found()


@asynccontextmanager
async def held_body(
    scope: Scope, receive: Receive, budget: BodyBudget, max_bytes: int, timeout_s: float
) -> AsyncIterator[ReceivedBody]:
    """The body; its bytes are held in the budget while the block runs. Raises ApiError 413, 408 or 503, or ClientGone."""
    held = budget.open(gone_of(scope))
    try:
        yield await read_body(scope, receive, held, max_bytes, timeout_s)
    finally:
        held.close()


class BodyReader:
    """Reads bodies of requests that generate nothing. As many of these as of generation requests may be open."""

    def __init__(self, settings: GatewaySettings, bodies: BodyBudget) -> None:
        self._settings = settings
        self.budget = bodies
        self._num_open = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive, max_bytes: int = limits.MAX_BODY_BYTES) -> AsyncIterator[ReceivedBody]:
        """Yields the body. Its bytes are held in the budget while the block runs, which is cancelled if the client leaves.

        Raises:
            ApiError: Too many requests are open, the body is too large or too slow, or the client has left (499).
        """
        settings = self._settings
        if self._num_open >= settings.max_concurrent_requests:
            raise unavailable("Too many requests are in flight.", settings.retry_after_s, "queue_full")
        self._num_open += 1
        try:
            most = min(max_bytes, settings.max_body_bytes)
            async with held_body(scope, receive, self.budget, most, settings.body_timeout_s) as body:
                with attended(scope, receive):
                    yield body
        except ClientGone:
            raise ApiError(CLIENT_CLOSED, "The client closed its connection.") from None
        finally:
            self._num_open -= 1


async def read_body(scope: Scope, receive: Receive, held: HeldBytes, max_bytes: int, timeout_s: float) -> ReceivedBody:
    """Whoever opened `held` closes it: it holds the bytes, or more where the parsed values will take more. timeout_s: seconds
    for all of it, not counting those in which it waited for room. Raises ApiError 413, 408 or 503, or ClientGone."""
    declared = _declared(scope)
    if declared > max_bytes:
        raise body_too_large(max_bytes)
    await held.grow_to(declared)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            body = ReceivedBody(await _collect(receive, held, declared, max_bytes, limit), held.grow_by)
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time.", code="timeout") from None
    await hold_values(held, body)
    return body


async def _collect(receive: Receive, held: HeldBytes, declared: int, max_bytes: int, limit: asyncio.Timeout) -> bytes | bytearray:
    message = await receive()
    content = bytearray()
    while message["type"] != "http.disconnect":
        part, more = message.get("body", b""), message.get("more_body", False)
        if not more and not content and len(part) <= declared:
            return bytes(part)
        size = len(content) + len(part)
        if size > max_bytes:
            raise body_too_large(max_bytes)
        if size > held.size:
            await _make_room(held, min(_step_of(size), max_bytes), limit)
        content += part
        if not more:
            return content
        message = await receive()
    raise ClientGone


def _step_of(size: int) -> int:
    """What is held for a body that has so many bytes and does not say how many will come."""
    step = SMALL_BODY_BYTES if size <= SMALL_BODY_BYTES else BODY_STEP_BYTES
    return -(-size // step) * step


async def _make_room(held: HeldBytes, size: int, limit: asyncio.Timeout) -> None:
    loop, until = asyncio.get_running_loop(), limit.when()
    assert until is not None
    left_s = until - loop.time()
    limit.reschedule(None)
    try:
        await held.grow_to(size)
    finally:
        limit.reschedule(loop.time() + left_s)


def _declared(scope: Scope) -> int:
    """Bytes, 0 where the head does not say."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        continue
