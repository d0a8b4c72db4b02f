"""Reads an HTTP request's body with limits that hold while reading, whatever the headers say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope

from services.gateway.http.body_budget import BodyBudget, ClientGone, Gone, HeldBytes
from services.gateway.request.bodies import ReceivedBody
from services.gateway.request.errors import ApiError
from services.shared.limits import BODY_STEP_BYTES, JSON_VALUE_BYTES, MAX_JSON_VALUES, SMALL_BODY_BYTES

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


@asynccontextmanager
async def attended(scope: Scope, receive: Receive, on_gone: Callable[[], None] | None = None) -> AsyncIterator[None]:
    """The block is cancelled once the client has closed its connection, and ClientGone raised. on_gone: called before that. The
    body has been read."""
    work, left = asyncio.current_task(), False
    assert work is not None

    def leave() -> None:
        nonlocal left
        left = True
        if on_gone is not None:
            on_gone()
        work.cancel()

    stop = watch(scope, receive, leave)
    try:
        yield
    except asyncio.CancelledError:
        if not left:
            raise
        work.uncancel()
        raise ClientGone from None
    finally:
        stop()


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


async def read_body(scope: Scope, receive: Receive, held: HeldBytes, max_bytes: int, timeout_s: float) -> ReceivedBody:
    """Whoever opened `held` closes it: it holds the bytes, or more where the parsed values will take more. timeout_s: seconds
    for all of it, not counting those in which it waited for room. Raises ApiError 413, 408 or 503, or ClientGone."""
    declared = _declared(scope)
    if declared > max_bytes:
        raise _too_large(max_bytes)
    await held.grow_to(declared)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            body = ReceivedBody(await _collect(receive, held, declared, max_bytes, limit), held.grow_by)
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time.", code="timeout") from None
    if held.size > SMALL_BODY_BYTES:  # a small one becomes little, whatever it is made of
        await _make_room_for_values(held, body.num_values)
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
            raise _too_large(max_bytes)
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


async def _make_room_for_values(held: HeldBytes, values: int) -> None:
    if values > MAX_JSON_VALUES:
        message = f"The request's body has more than {MAX_JSON_VALUES} values, counted as commas and opening brackets."
        raise ApiError(413, message, code="request_too_large")
    await held.grow_to(min(values * JSON_VALUE_BYTES, held.most))


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


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {max_bytes} bytes.", code="request_too_large")
