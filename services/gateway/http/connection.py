"""One HTTP connection: uvicorn's, with limits on everything that comes before, between and behind bodies.

Whatever a client sends, what is kept of it until a request begins is MAX_HEAD_BYTES at most, for MAX_HEAD_SECONDS at most. What
comes behind a request, before its answer is out, is kept as it came and parsed then, MAX_HEAD_BYTES and one read at most. What
the parser refuses is refused in the API's shape. A refusal is written, and then what still comes is thrown away for a moment: a
connection that is closed with something unread loses its last answer.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.gateway.http.body import CUT, GONE, WATCH
from services.gateway.http.connection_table import ConnectionTable
from services.gateway.request.errors import ApiError, unavailable
from services.shared.limits import MAX_HEAD_BYTES

CHUNKED_BYTES = 4096  # that are parsed at once of a body that does not say its size: its end may be followed by requests
MOST_PIPELINED = 64  # requests that are parsed with it, or behind a head that was cut in its last bytes
HEAD_ENDS = (b"\n\r\n", b"\n\n")
LINGER_S = 2.0  # in which a client that is still sending can read why it was refused
GONE_POLL_S = 0.25  # while nothing is read
CLOSED = frozenset((7, 8))  # TCP_CLOSE after a reset, TCP_CLOSE_WAIT after the last byte; of Linux's tcp_states.h
WITHOUT_CHUNKS = frozenset(("0.9", "1.0"))  # HTTP versions without transfer codings: RFC 9112, section 6.1
OF_HEALTH = frozenset((b"/health", b"/readiness", b"/ready"))


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """head_s: seconds for a complete head. retry_after_s: of a 503. on_refused: receives each error that the connection sends
    without the application."""

    head_s: float
    retry_after_s: int
    on_refused: Callable[[ApiError], None]


class AnswerTransport(asyncio.Transport):
    """What answers are written to. How a connection ends is for `end` to say: it knows what is on its way."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self._end = end

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._end()


class ReadingFlow(FlowControl):
    """Whoever wants more to be read may say so; it is not while there is no room for it."""

    def __init__(self, transport: asyncio.Transport, has_room: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._has_room = has_room

    def resume_reading(self) -> None:
        if self._has_room():
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """Registers itself in `table`. Not thread-safe: its event loop's alone."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: ConnectionTable,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = table
        self._limits = limits
        self._served = self.app
        self._lost = False
        self._unparsed = 0  # bytes since the parser last got anywhere
        self._in_head = True
        self._head_begun = False
        self._body_left: int | None = 0  # bytes of the body that is coming; None: it does not say
        self._held = bytearray()  # not parsed yet, from _held_at on
        self._held_at = 0
        self._running: RequestResponseCycle | None = None
        self._next_is_last = False
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._has_room = True
        self._watchers: dict[object, Callable[[], None]] = {}
        self._extensions: dict[str, Any] = {GONE: self._gone, WATCH: self._watch, CUT: self._cut}

    # Of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = ReadingFlow(transport, lambda: self._held_bytes <= MAX_HEAD_BYTES)
        self._answer_transport = AnswerTransport(transport, self._end)
        self._expect_head()
        self._has_room = self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._stop_timer()
        super().connection_lost(exc)
        self._lost = True
        self._let_go()
        if self._running is not None and not self._running.response_complete:  # it need not be the newest
            self._running.disconnected = True
            self._running.message_event.set()
        for on_gone in list(self._watchers.values()):
            on_gone()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._held_bytes:
            self._held += data
        elif (end := self._parse(data, 0)) < len(data):
            self._held += data[end:]
        if self._held_bytes > MAX_HEAD_BYTES:
            self.flow.pause_reading()

    def _parse(self, data: bytes | bytearray, at: int) -> int:
        """From there up to the end of a request that has to be answered first, or of the data. Returns where that is."""
        while at < len(data) and not self._over and not (self._in_head and self._answers()):
            if self._in_head and self._timer is None:
                self._expect_head()
            end = self._piece_end(data, at)
            self._unparsed += end - at
            self._feed(data[at:end])
            at = end
            if self._unparsed >= MAX_HEAD_BYTES and not self._refused:
                self._refuse(ApiError(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", code="head_too_large"))
        return len(data) if self._over else at

    def _piece_end(self, data: bytes | bytearray, at: int) -> int:
        """What is parsed at once ends with a request where that can be told."""
        most = min(len(data), at + MAX_HEAD_BYTES - self._unparsed)
        if self._in_head:
            for mark in HEAD_ENDS:
                if (found := data.find(mark, at, most)) >= 0:
                    most = found + len(mark)
            return most
        return min(most, at + (CHUNKED_BYTES if self._body_left is None else self._body_left or 1))

    @property
    def _over(self) -> bool:
        """What comes is thrown away."""
        return self._refused or self.transport.is_closing()

    @property
    def _held_bytes(self) -> int:
        return len(self._held) - self._held_at

    def _go_on(self) -> None:
        """With what was held, for an answer has gone out."""
        self._held_at = self._parse(self._held, self._held_at)
        if not self._held_bytes:
            self._let_go()
        elif self._held_at > MAX_HEAD_BYTES:
            del self._held[: self._held_at]
            self._held_at = 0
        self.flow.resume_reading()

    def _let_go(self) -> None:
        self._held, self._held_at = bytearray(), 0

    def _feed(self, piece: bytes | bytearray) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            return  # none is offered, and the request has begun as any other
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"This is not HTTP/1.1: {error}.", code="bad_http"))

    # Of the parser

    def on_message_begin(self) -> None:
        self._head_begun = True
        if self._timer is None:
            self._expect_head()
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_headers_complete(self) -> None:
        self._in_head, self._head_begun, self._unparsed = False, False, 0
        self._body_left = _length_of(self.headers)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if len(self.pipeline) >= MOST_PIPELINED:
            self.close_idle()
        if self._refused:
            return
        self._table.busy(self)
        health = self.url.partition(b"?")[0] in OF_HEALTH
        self._has_room = self._has_room or not self._table.full
        if self.parser.get_http_version() in WITHOUT_CHUNKS:
            self.expect_100_continue = False  # RFC 9110, section 10.1.1
        self.app = self._served if self._has_room or health else self._overloaded
        super().on_headers_complete()
        self.cycle.transport = self._answer_transport
        self.cycle.keep_alive = self.cycle.keep_alive and not (self._table.last_answers or self._next_is_last)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] in WITHOUT_CHUNKS:
            cycle.keep_alive = False
            app = _ended_by_close(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        if self._body_left is not None:
            self._body_left -= len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        drained = self._drains()
        self._in_head, self._unparsed = True, 0
        if self._refused:
            return
        super().on_message_complete()
        if drained and not self._refused:
            self._stop_timer()
            self._table.idle(self)
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    # Of requests

    def shutdown(self) -> None:
        """Where an answer has begun that does not say that it is the last one, what is held behind it is answered and says so."""
        if self._held_bytes and self._answers() and self.cycle.response_started:
            self._next_is_last = True
        else:
            super().shutdown()

    def close_after_answer(self) -> None:
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        if self._refused:
            self.pipeline.clear()  # behind the last answer there is none
        super().on_response_complete()
        if self._refused:
            self._unset_keepalive_if_required()
            return
        if self.transport.is_closing() or self._answers():
            return  # the next one in the pipeline is being answered
        if self._in_head and self._held_bytes:
            self._unset_keepalive_if_required()
            self._go_on()
            if self._answers() or not self._in_head or self._over:
                return
        if self._in_head:
            self._table.idle(self)
        elif self.expect_100_continue:
            self._linger()  # what comes may be the body, or the next request of a client that does not send it any more
        else:
            self._drain()

    def _end(self) -> None:
        """Behind an answer that is the last one. Its client may be sending still."""
        if self._in_head or self._refused:
            self.transport.close()
        else:
            self._linger()

    def _drain(self) -> None:
        """Answered before its body was there. Who has it under way goes on with the connection; nobody waits for it for long."""
        self._unset_keepalive_if_required()
        self._timer = self.loop.call_later(LINGER_S, self.close_idle)

    def close_idle(self) -> None:
        """At once, also where its client has not read the end of its answer: that would keep it for as long as it likes."""
        self._refused = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    async def _overloaded(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = unavailable("The server has as many connections as it can.", self._limits.retry_after_s, "too_many_connections")
        self._limits.on_refused(error)
        headers = [*error.headers(), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": error.json()})

    # Time and refusal

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._answers():
            self._expect_head()  # of a request that is pipelined behind the one being answered
        elif not self._head_begun:
            self.close_idle()
        else:
            self._refuse(ApiError(408, "The request's head did not arrive in time.", code="timeout"))

    async def _gone(self) -> None:
        while not self.transport.is_closing() and not _peer_has_closed(self.transport):
            await asyncio.sleep(GONE_POLL_S)

    def _watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        if self._lost:
            return self.loop.call_soon(on_gone).cancel
        self.flow.resume_reading()  # a large body has stopped it, and only who reads learns that a client has gone
        watcher = object()
        self._watchers[watcher] = on_gone
        return lambda: self._unwatch(watcher)

    def _unwatch(self, watcher: object) -> None:
        del self._watchers[watcher]

    def _cut(self) -> None:
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        self.close_idle()

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _drains(self) -> bool:
        """The rest of a body comes in whose request has been answered."""
        return not self._in_head and self.cycle is not None and self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """The last thing that the connection says, unless an answer to an earlier request is under way, or this one's has been
        given: then nothing is said."""
        if self._answers():
            self.close_idle()
            return
        if self._drains():
            self._linger()
            return
        self._limits.on_refused(error)
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in error.headers()]
        self.transport.write(b"\r\n".join([*lines, b"", error.json()]))
        self._linger()

    def _linger(self) -> None:
        self._refused = True
        self._stop_timer()
        self._table.busy(self)
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.close_idle)


def _ended_by_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Returns an application whose responses without a length are sent without chunks. The end of the connection ends their body.

    The cycle chunks a response unless `chunked_encoding` is set. Without chunks it counts the bytes of `expected_content_length`,
    which is therefore set to the size of each piece.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return serve


def _length_of(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Of a body, by what the parser has found to be right; None: it comes in chunks."""
    found = dict(headers)  # names are lower case here
    return None if b"transfer-encoding" in found else int(found.get(b"content-length", b"0"))


def _peer_has_closed(transport: asyncio.BaseTransport) -> bool:
    """By what the kernel knows of a connection that is not being read. False also where it does not say. An end that waits behind
    bytes for which there is no window is not known yet."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or not sys.platform.startswith("linux"):
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in CLOSED
    except OSError:
        return True  # its descriptor is closed
