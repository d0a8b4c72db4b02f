"""The events of a response in the background as a stream: what the store has, then what comes, whichever gateway makes it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.body import cut, watch
from services.gateway.http.direct_routes import HEAD
from services.gateway.request.errors import OPENAI, ApiError
from services.gateway.state.background_record import Page
from services.gateway.state.background_store import BackgroundStore
from services.gateway.state.state_store import StoreAway

POLL_S = 0.15  # at what another gateway has written
UNREAD_S = 60.0  # that a client may leave what is sent; it can resume its stream
AWAY_S = 30.0  # that a stream waits for the store
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Streams:
    """All that are open here. comment_s: seconds of silence behind which a stream gets a comment; 0: none."""

    def __init__(self, store: BackgroundStore, comment_s: float) -> None:
        self._store = store
        self._comment_s = comment_s
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by response
        self.num_open = 0
        self._closed = asyncio.Event()

    def wrote(self, response_id: str) -> None:
        """There are new events of it."""
        for waiting in self._waiting.pop(response_id, ()):
            if not waiting.done():
                waiting.set_result(None)

    def close(self) -> None:
        """All end where they are: what is behind is told at another gateway."""
        self._closed.set()
        for response_id in list(self._waiting):
            self.wrote(response_id)

    def stream(self, owner: str, response_id: str, first: int) -> Response:
        """Its events from this sequence number on."""
        return _Stream(self, owner, response_id, first)

    async def follow(self, owner: str, response_id: str, first: int, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self.num_open += 1
        try:
            said = loop.time()
            while True:
                page = await self._page(owner, response_id, first)
                if page is None:
                    return
                if page.events:
                    await send(_body(b"".join(map(_event, page.events))))
                    first, said = first + len(page.events), loop.time()
                if first >= page.total:
                    if page.is_over:
                        return
                    if self._comment_s and loop.time() - said >= self._comment_s:
                        await send(_body(OPENAI.comment))
                        said = loop.time()
                    await self._wait(response_id)
        finally:
            self.num_open -= 1

    async def _page(self, owner: str, response_id: str, first: int) -> Page | None:
        """None: there is nothing any more, or all streams end. Raises StoreAway."""
        loop = asyncio.get_running_loop()
        until = loop.time() + AWAY_S
        while not self._closed.is_set():
            asking = asyncio.create_task(self._store.follow(owner, response_id, first))
            closed = asyncio.create_task(self._closed.wait())
            try:
                await asyncio.wait((asking, closed), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            except StoreAway:
                if loop.time() > until:
                    raise
                await asyncio.sleep(POLL_S)
            finally:
                asking.cancel()
                closed.cancel()
        return None

    async def _wait(self, response_id: str) -> None:
        """For a piece that is written here, or a moment."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(response_id, []).append(waiting)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await waiting
        finally:
            others = self._waiting.get(response_id)
            if others is not None and waiting in others:
                others.remove(waiting)
                if not others:
                    del self._waiting[response_id]


class _Stream(Response):
    """One of them. Its end is the client's: the response goes on."""

    background = None

    def __init__(self, streams: Streams, owner: str, response_id: str, first: int) -> None:
        # Not Response.__init__: there is no content.
        self._streams = streams
        self._of = (owner, response_id, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, left = asyncio.current_task(), False
        assert work is not None

        def leave() -> None:
            nonlocal left
            left = True
            work.cancel()

        stop = watch(scope, receive, leave)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if HEAD not in scope.get("extensions", {}):
                await self._follow(scope, _impatient(send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            cut(scope)  # nobody reads it
        except asyncio.CancelledError:
            if not left:
                raise
            work.uncancel()
        finally:
            stop()

    async def _follow(self, scope: Scope, send: Send) -> None:
        try:
            await self._streams.follow(*self._of, send)
        except StoreAway:
            error = ApiError(503, "What is kept cannot be reached just now.", code="store_unavailable")
            await send(_body(OPENAI.event_of(error, scope["state"]["request_id"])))


def _impatient(send: Send) -> Send:
    """Raises TimeoutError where the client does not read."""

    async def sent(message: Message) -> None:
        async with asyncio.timeout(UNREAD_S):
            await send(message)

    return sent


def _event(event: bytes) -> bytes:
    """Named by its type, which its JSON begins with."""
    kind = event[len(b'{"type":"') : event.index(b'"', len(b'{"type":"'))]
    return b"event: %s\ndata: %s\n\n" % (kind, event)


def _body(content: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": content, "more_body": True}
