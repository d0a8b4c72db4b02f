"""An HTTP connection: uvicorn's protocol, with limits on request heads and pipelined requests.

- A request head has at most MAX_HEAD_BYTES, and arrives within MAX_HEAD_SECONDS.
- Bytes that follow a request are pipelined requests. They are buffered, and parsed after the response has been sent. The buffer
  has at most MAX_HEAD_BYTES plus the bytes of one read.
- Bytes that are not HTTP are refused with an error in the form of OpenAI's API.
- A refusal is the last response of its connection. The connection then discards input for LINGER_S before it closes, because
  closing a socket with unread input makes the kernel discard the response.

The class overrides methods of uvicorn that are not documented. tests/contracts/test_uvicorn_internals.py lists them.
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

from rootstock_llm.services.gateway.generation.errors import ApiError, unavailable
from rootstock_llm.services.gateway.http.body import CUT, GONE, WATCH
from rootstock_llm.services.gateway.http.connection_table import ConnectionTable
from rootstock_llm.services.shared.limits import MAX_HEAD_BYTES

CHUNKED_BYTES = 4096  # bytes of a chunked body that are parsed at once; few, because pipelined requests may follow
# Largest number of requests that are parsed while an earlier request waits for its response. Usually, parsing stops at the end of
# a request. It continues if the next requests are in the same piece as the end of a chunked body, or as the end of a head whose
# end mark arrived in two reads.
MOST_PIPELINED = 64
HEAD_ENDS = (b"\n\r\n", b"\n\n")
LINGER_S = 2.0  # seconds between the last response and the close; a client that still sends can then read the response
GONE_POLL_S = 0.25  # seconds between two checks for a closed connection while nothing is read
CLOSED = frozenset((7, 8))  # TCP_CLOSE (after a reset) and TCP_CLOSE_WAIT (after the last byte) in Linux's tcp_states.h
WITHOUT_CHUNKS = frozenset(("0.9", "1.0"))  # HTTP versions without transfer codings (RFC 9112, section 6.1)
FRAMING = frozenset((b"content-length", b"transfer-encoding"))  # headers that determine where a body ends
HEALTH_PATHS = frozenset((b"/health", b"/readiness", b"/ready"))  # served even on connections above the limit of connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits that all connections of a server share."""

    head_s: float  # seconds for a complete request head
    retry_after_s: int  # seconds in the Retry-After header of a 503
    on_refused: Callable[[ApiError], None]  # receives each error that a connection sends without the application


class ResponseTransport(asyncio.Transport):
    """The transport to which uvicorn writes a response.

    `close` calls `end` instead of closing the socket. `end` is Connection._end(), which delays the close if the client may
    still be sending.
    """

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
    """uvicorn's flow control, except that it does not resume reading while `may_read` returns False."""

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        if self._may_read():
            super().resume_reading()


class BodyCallbacks:
    """Forwards the callbacks of a parser to a connection, except those of a first head until `head_is_read` is set."""

    def __init__(self, connection: HttpToolsProtocol) -> None:
        self._connection = connection
        self.head_is_read = False
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete

    def on_message_begin(self) -> None:
        if self.head_is_read:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.head_is_read:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_is_read:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.head_is_read:
            self._connection.on_headers_complete()


class Connection(HttpToolsProtocol):
    """The connection of a client, from its acceptance until it is lost. Registers itself in `table`.

    All methods run on the connection's event loop.
    """

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
        self._application = self.app
        self._lost = False
        self._unparsed = 0  # bytes fed to the parser since the end of the last head or piece of a body
        self._in_head = True  # the next bytes belong to a request head
        self._head_begun = False  # the parser has seen the first byte of the head
        self._body_left: int | None = 0  # remaining bytes of the body, or None if it is chunked
        self._buffer = bytearray()  # received bytes that wait to be parsed, and parsed bytes before _parsed_to
        self._parsed_to = 0  # index of the first unparsed byte of _buffer
        self._running: RequestResponseCycle | None = None  # the newest cycle whose application has been started
        self._next_is_last = False  # the next response closes the connection
        self._timer: asyncio.TimerHandle | None = None  # time limit of a head, or of a connection that is about to close
        self._refused = False  # the last response has been sent; all input after it is discarded
        self._admitted = True  # the table had space for this connection; otherwise it serves only HEALTH_PATHS
        self._watchers: dict[object, Callable[[], None]] = {}  # callbacks for the end of the connection
        self._extensions: dict[str, Any] = {GONE: self._gone, WATCH: self._watch, CUT: self._cut}

    # Called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = ReadingFlow(transport, lambda: self._buffered_bytes <= MAX_HEAD_BYTES)
        self._response_transport = ResponseTransport(transport, self._end)
        self._expect_head()
        self._admitted = self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._stop_timer()
        super().connection_lost(exc)
        self._lost = True
        self._clear_buffer()
        # uvicorn notifies only the newest cycle, and pipelined requests may have made newer ones.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        for on_gone in list(self._watchers.values()):
            on_gone()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._buffered_bytes:
            self._buffer += data
        elif (end := self._parse(data, 0)) < len(data):
            self._buffer += data[end:]
        if self._buffered_bytes > MAX_HEAD_BYTES:
            self.flow.pause_reading()

    def _parse(self, data: bytes | bytearray, at: int) -> int:
        """Parses the data from index `at` on.

        Returns:
            The index of the first unparsed byte. It is less than the length if the bytes from there on belong to a request that
            is parsed only after the current response.
        """
        while at < len(data) and not self._discards_input and not (self._in_head and self._is_responding()):
            if self._in_head and self._timer is None:
                self._expect_head()
            end = self._piece_end(data, at)
            self._unparsed += end - at
            at += self._feed(data[at:end])
            if self._unparsed >= MAX_HEAD_BYTES and not self._refused:
                self._refuse(ApiError(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", code="head_too_large"))
        return len(data) if self._discards_input else at

    def _piece_end(self, data: bytes | bytearray, at: int) -> int:
        """Returns the end of the piece to parse next.

        A piece ends where a head or a body ends, if that position can be found. So a piece rarely has bytes of two requests.
        """
        most = min(len(data), at + MAX_HEAD_BYTES - self._unparsed)
        if self._in_head:
            for mark in HEAD_ENDS:
                if (found := data.find(mark, at, most)) >= 0:
                    most = found + len(mark)
            return most
        return min(most, at + (CHUNKED_BYTES if self._body_left is None else self._body_left or 1))

    @property
    def _discards_input(self) -> bool:
        """Whether the connection discards all input from now on."""
        return self._refused or self.transport.is_closing()

    @property
    def _buffered_bytes(self) -> int:
        return len(self._buffer) - self._parsed_to

    def _parse_buffer(self) -> None:
        """Parses the buffered input after a response has been sent."""
        self._parsed_to = self._parse(self._buffer, self._parsed_to)
        if not self._buffered_bytes:
            self._clear_buffer()
        elif self._parsed_to > MAX_HEAD_BYTES:
            del self._buffer[: self._parsed_to]
            self._parsed_to = 0
        self.flow.resume_reading()

    def _clear_buffer(self) -> None:
        self._buffer, self._parsed_to = bytearray(), 0

    def _feed(self, piece: bytes | bytearray) -> int:
        """Parses a piece.

        Returns:
            The number of parsed bytes. Parsing stops early only after the head of a request with `Upgrade`.
        """
        parsed = len(piece)
        try:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                parsed = int(upgrade.args[0])
                if not self._in_head:
                    self.parser = self._parser_of_body()
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"This is not HTTP/1.1: {error}.", code="bad_http"))
        return parsed

    def _parser_of_body(self) -> httptools.HttpRequestParser:
        """Returns a parser for the body of the request whose head has been parsed, and for the requests after it.

        The gateway offers no upgrade and serves a request with `Upgrade` as any other (RFC 9110, section 7.8). But a parser of
        httptools ends such a request after its head. The new parser has read a head without `Upgrade` that frames the same body.
        """
        callbacks = BodyCallbacks(self)
        parser = httptools.HttpRequestParser(callbacks)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn's parser
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING]
        parser.feed_data(b"POST / HTTP/%b\r\n%b\r\n" % (self.parser.get_http_version().encode(), b"".join(framing)))
        callbacks.head_is_read = True
        return parser

    # Called by the HTTP parser

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
        health = self.url.partition(b"?")[0] in HEALTH_PATHS
        self._admitted = self._admitted or not self._table.full
        if self.parser.get_http_version() in WITHOUT_CHUNKS:
            self.expect_100_continue = False  # RFC 9110, section 10.1.1
        self.app = self._application if self._admitted or health else self._overloaded
        super().on_headers_complete()
        self.cycle.transport = self._response_transport
        self.cycle.keep_alive = self.cycle.keep_alive and not (self._table.last_answers or self._next_is_last)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] in WITHOUT_CHUNKS:
            cycle.keep_alive = False
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        if self._body_left is not None:
            self._body_left -= len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body_left != 0 and self.parser.should_upgrade():
            return  # the body follows; see _parser_of_body()
        drained = self._is_draining()
        self._in_head, self._unparsed = True, 0
        if self._refused:
            return
        super().on_message_complete()
        if drained and not self._refused:
            self._stop_timer()
            self._table.idle(self)
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    # Requests and their responses

    def shutdown(self) -> None:
        """Closes the connection after its current response.

        If the head of that response was sent without `connection: close` and a pipelined request is buffered, the connection
        also serves this request. It closes after the second response, whose head has `connection: close`.
        """
        if self._buffered_bytes and self._is_responding() and self.cycle.response_started:
            self._next_is_last = True
        else:
            super().shutdown()

    def close_after_answer(self) -> None:
        """Closes the connection after the response to its newest request, unless the head of that response is sent already."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        if self._refused:
            self.pipeline.clear()  # the requests in the pipeline get no response
        super().on_response_complete()
        if self._refused:
            self._unset_keepalive_if_required()
            return
        if self.transport.is_closing() or self._is_responding():
            return  # the next request of the pipeline is being answered
        if self._in_head and self._buffered_bytes:
            self._unset_keepalive_if_required()
            self._parse_buffer()
            if self._is_responding() or not self._in_head or self._discards_input:
                return
        if self._in_head:
            self._table.idle(self)
        elif self.expect_100_continue:
            self._linger()  # the next bytes are the body or, if the client skips the body, the next request
        else:
            self._drain()

    def _end(self) -> None:
        """Ends the connection after the last response. The client may still be sending."""
        if self._in_head or self._refused:
            self.transport.close()
        else:
            self._linger()

    def _drain(self) -> None:
        """Discards the rest of a request's body after its response. Closes the connection if that takes longer than LINGER_S."""
        self._unset_keepalive_if_required()
        self._timer = self.loop.call_later(LINGER_S, self.close_idle)

    def close_idle(self) -> None:
        """Closes the connection at once. Output that the client has not read is discarded."""
        self._refused = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    async def _overloaded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of connections above the limit: responds with 503 and ends the connection."""
        error = unavailable(
            "The server has reached its limit of connections. Retry later.", self._limits.retry_after_s, "too_many_connections"
        )
        self._limits.on_refused(error)
        headers = [*error.headers(), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": error.json()})

    # Time limits and refusals

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._is_responding():
            self._expect_head()  # the head of a pipelined request waits for the current response
        elif not self._head_begun:
            self.close_idle()
        else:
            self._refuse(ApiError(408, "The request's head did not arrive in time.", code="timeout"))

    async def _gone(self) -> None:
        """Returns when the client has closed its connection. Implements the extension GONE."""
        while not self.transport.is_closing() and not _client_has_closed(self.transport):
            await asyncio.sleep(GONE_POLL_S)

    def _watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Registers `on_gone` to be called when the connection is lost. Implements the extension WATCH.

        Returns:
            A function that removes the callback.
        """
        if self._lost:
            return self.loop.call_soon(on_gone).cancel
        self.flow.resume_reading()  # a large body has paused reading, and only a read reports that the client has left
        watcher = object()
        self._watchers[watcher] = on_gone
        return lambda: self._unwatch(watcher)

    def _unwatch(self, watcher: object) -> None:
        del self._watchers[watcher]

    def _cut(self) -> None:
        """Aborts the connection. Implements the extension CUT."""
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        self.close_idle()

    def _is_responding(self) -> bool:
        """Returns whether the response to the newest request is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _is_draining(self) -> bool:
        """Returns whether the response is complete, but a part of the request's body has not arrived yet."""
        return not self._in_head and self.cycle is not None and self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Sends the error as the last response of the connection.

        If a response is incomplete, or if the error is in the body of a request that already has its response, closes the
        connection without sending the error.
        """
        if self._is_responding():
            self.close_idle()
            return
        if self._is_draining():
            self._linger()
            return
        self._limits.on_refused(error)
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in error.headers()]
        self.transport.write(b"\r\n".join([*lines, b"", error.json()]))
        self._linger()

    def _linger(self) -> None:
        """Closes the connection for output, discards input for LINGER_S, and then closes the connection."""
        self._refused = True
        self._stop_timer()
        self._table.busy(self)
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.close_idle)


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wraps `app` so that a response without Content-Length is sent without chunks. Closing the connection ends its body.

    uvicorn's RequestResponseCycle sends chunks unless `chunked_encoding` is False. Without chunks, it checks the body against
    `expected_content_length`. Before each body message, the wrapper therefore sets this attribute to the size of the message.
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
    """Returns the length of the body in bytes, or None if it is chunked. The parser has validated the headers."""
    found = dict(headers)  # names are lower case here
    return None if b"transfer-encoding" in found else int(found.get(b"content-length", b"0"))


def _client_has_closed(transport: asyncio.BaseTransport) -> bool:
    """Returns whether the client has closed the connection, by the kernel's TCP state. Works while reading is paused.

    Always returns False on systems other than Linux. Also returns False while the receive window is full, because the client's
    FIN then has not arrived.
    """
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or not sys.platform.startswith("linux"):
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in CLOSED
    except OSError:
        return True  # the descriptor is closed
