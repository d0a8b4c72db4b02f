"""Reads the bodies of HTTP requests, and watches whether their clients are connected.

The limits on size and time are enforced while a body is read, because its Content-Length may be missing or wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive, Scope

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.generation.bodies import BodyBudget, ClientGone, Gone, RequestBody, body_too_large
from rootstock_llm.services.gateway.generation.errors import CLIENT_CLOSED, ApiError, unavailable
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.limits import BODY_STEP_BYTES, SMALL_BODY_BYTES

# Names of the callables that Connection adds to the extensions of an ASGI scope.
GONE = "rootstock.gone"  # async; returns when the client has closed its connection
WATCH = "rootstock.watch"  # registers a callback for the end of the connection; returns a function that removes the callback
CUT = "rootstock.cut"  # aborts the connection, and discards unsent output


def gone_of(scope: Scope) -> Gone:
    """Returns a function that waits until the client has closed its connection.

    If the server does not have the extension GONE, the function never returns.
    """
    found: Gone = scope.get("extensions", {}).get(GONE, asyncio.Event().wait)
    return found


def watch(scope: Scope, receive: Receive, on_gone: Callable[[], None]) -> Callable[[], None]:
    """Calls `on_gone` when the client closes its connection. The body must have been read.

    Returns:
        A function that ends the watch.
    """
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
        self._client_left = False

    def start(self) -> None:
        """Begins to watch, for the current task. The body must have been read."""
        self._task = asyncio.current_task()
        self._stop = watch(self._scope, self._receive, self._on_client_left)

    def __enter__(self) -> ClientWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._stop is not None:
            self._stop()
        if self._client_left and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise ClientGone from None

    def _on_client_left(self) -> None:
        assert self._task is not None
        self._client_left = True
        self._task.cancel()


def watch_client(scope: Scope, receive: Receive) -> ClientWatch:
    """Returns a started ClientWatch of the current task, for a `with` block. The body must have been read."""
    client = ClientWatch(scope, receive)
    client.start()
    return client


def cut(scope: Scope) -> None:
    """Aborts the client's connection. Has no effect if the server does not have the extension CUT."""
    found = scope.get("extensions", {}).get(CUT)
    if found is not None:
        found()


@asynccontextmanager
async def reserved_body(
    scope: Scope, receive: Receive, budget: BodyBudget, max_bytes: int, timeout_s: float
) -> AsyncIterator[RequestBody]:
    """Yields the body, whose bytes stay reserved in the budget until the `async with` block ends.

    Args:
        max_bytes: Largest size of the body.
        timeout_s: Seconds for the whole body, without the time in which it waits for the budget.

    Raises:
        ApiError: The body is too large (413), too slow (408), or the budget has no space for it (503).
        ClientGone: The client has closed its connection.
    """
    body = budget.open(gone_of(scope))
    try:
        await read_body(scope, receive, body, max_bytes, timeout_s)
        yield body
    finally:
        body.close()


class BodyReader:
    """Reads the bodies of requests that do not generate.

    At most `max_concurrent_requests` such requests are open at once. Generation requests are counted separately, with the same
    limit.
    """

    def __init__(self, settings: GatewaySettings, bodies: BodyBudget) -> None:
        self._settings = settings
        self.budget = bodies
        self._num_open = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive, max_bytes: int = limits.MAX_BODY_BYTES) -> AsyncIterator[RequestBody]:
        """Yields the body. Its bytes stay reserved until the `async with` block ends.

        If the client closes its connection, the block is cancelled.

        Raises:
            ApiError: Too many requests are open (503), the body cannot be read (see reserved_body()), or the client has closed
                its connection (499).
        """
        settings = self._settings
        if self._num_open >= settings.max_concurrent_requests:
            raise unavailable("Too many requests are in flight.", settings.retry_after_s, "queue_full")
        self._num_open += 1
        try:
            most = min(max_bytes, settings.max_body_bytes)
            async with reserved_body(scope, receive, self.budget, most, settings.body_timeout_s) as body:
                with watch_client(scope, receive):
                    yield body
        except ClientGone:
            raise ApiError(CLIENT_CLOSED, "The client closed its connection.") from None
        finally:
            self._num_open -= 1


async def read_body(scope: Scope, receive: Receive, body: RequestBody, max_bytes: int, timeout_s: float) -> None:
    """Reads the content of a body, and reserves memory for its bytes and for its parsed values.

    Args:
        body: Receives the content and grows with it. The caller closes it.
        max_bytes: Largest size of the body.
        timeout_s: Seconds for the whole body, without the time in which it waits for the budget.

    Raises:
        ApiError: The body is too large (413), too slow (408), or the budget has no space for it (503).
        ClientGone: The client has closed its connection.
    """
    declared = _declared(scope)
    if declared > max_bytes:
        raise body_too_large(max_bytes)
    await body.grow_to(declared)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            content = await _collect(receive, body, declared, max_bytes, limit)
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time.", code="timeout") from None
    await body.receive(content)


async def _collect(
    receive: Receive, body: RequestBody, declared: int, max_bytes: int, limit: asyncio.Timeout
) -> bytes | bytearray:
    message = await receive()
    content = bytearray()
    while message["type"] != "http.disconnect":
        part, more = message.get("body", b""), message.get("more_body", False)
        if not more and not content and len(part) <= declared:
            return bytes(part)
        size = len(content) + len(part)
        if size > max_bytes:
            raise body_too_large(max_bytes)
        if size > body.size:
            await _grow(body, min(_step_of(size), max_bytes), limit)
        content += part
        if not more:
            return content
        message = await receive()
    raise ClientGone


def _step_of(size: int) -> int:
    """Returns the bytes to reserve for a body of which `size` bytes have arrived and whose final size is unknown.

    Rounds up, so that a body reserves memory a few times instead of at every received part.
    """
    step = SMALL_BODY_BYTES if size <= SMALL_BODY_BYTES else BODY_STEP_BYTES
    return -(-size // step) * step


async def _grow(body: RequestBody, size: int, limit: asyncio.Timeout) -> None:
    """Grows the body to `size` bytes. The time limit of the body is suspended while the body waits for the budget."""
    loop, until = asyncio.get_running_loop(), limit.when()
    assert until is not None
    left_s = until - loop.time()
    limit.reschedule(None)
    try:
        await body.grow_to(size)
    finally:
        limit.reschedule(loop.time() + left_s)


def _declared(scope: Scope) -> int:
    """Returns the Content-Length of the request in bytes; 0 if it is missing or invalid."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection, or has received the whole response."""
    while (await receive())["type"] != "http.disconnect":
        continue
