"""Serves generation requests over HTTP. The response is one document or a stream of server-sent events.

After the body is read, the client's connection is watched. If the client closes it, the request's task is cancelled, the
service releases the request, and no response is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.generation.bodies import ClientGone, RequestBody
from rootstock_llm.services.gateway.generation.choice import Delta
from rootstock_llm.services.gateway.generation.errors import CLIENT_CLOSED, OPENAI, ApiError, bad_request
from rootstock_llm.services.gateway.generation.origin import NOBODY, OMITTED_TOOLS, Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.generation.usage import generation_state
from rootstock_llm.services.gateway.http.body import BodyReader, ClientWatch, cut, gone_of, read_body
from rootstock_llm.services.gateway.observe.access_log import CUT, ERROR_CODE
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.service.sink import (
    CollectedAnswer,
    Detached,
    GenerationCall,
    MakeOperation,
    MakeRenderer,
    Respond,
    RunGeneration,
    Silence,
    Sink,
    StreamRenderer,
    headers_of,
    with_comments,
)
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

T = TypeVar("T")
READ_AHEAD_BYTES = 1 << 16  # response bytes that the server buffers for a slow client
UNREAD_S = 60.0  # seconds that a client may take to read one piece of a response that send_while_read() sends
ERROR_SEND_S = 0.5  # seconds for sending an error to a client that may have stopped reading
ROUTING_KEY_HEADER = b"x-smg-routing-key"
REPORT_HEADER = b"x-rootstock-report"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class HttpPort:
    """The functions and settings of the gateway that all routes share."""

    run: RunGeneration  # runs a generation request and sends its output to a sink
    settings: GatewaySettings
    bodies: BodyReader  # reads bodies of requests that do not generate
    logs_access: bool  # whether the access log is on; sinks then note the tokens and times of their requests


class GenerationEndpoint:
    """The ASGI endpoint of one generating operation. All requests of a route share one endpoint."""

    def __init__(self, port: HttpPort, make_operation: MakeOperation) -> None:
        self._port = port
        self._make_operation = make_operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, operation = self._port.settings, self._make_operation()
        headers, state = dict(scope["headers"]), scope["state"]
        key = headers.get(ROUTING_KEY_HEADER, b"")
        origin = Origin(
            state["request_id"],
            scope["path"],
            scope["method"],
            state.get("caller", NOBODY),
            str(key, "latin-1"),
            _trace_headers(headers),
        )
        sink = HttpSink(scope, send, operation.make_renderer, settings.sse_comment_s, self._port.logs_access)
        watch = ClientWatch(scope, receive)

        async def read(body: RequestBody) -> None:
            await read_body(scope, receive, body, settings.max_body_bytes, settings.body_timeout_s)
            watch.start()
            if len(key) > limits.MAX_ROUTING_KEY_CHARS:
                name = ROUTING_KEY_HEADER.decode()
                raise bad_request(name, f"'{name}' may have at most {limits.MAX_ROUTING_KEY_CHARS} characters.")

        wants_report = settings.playground and (REPORT_HEADER, b"1") in scope["headers"]
        call = GenerationCall(origin, operation.prepare, read, gone_of(scope), wants_report=wants_report)
        try:
            with watch:
                await self._port.run(call, sink)
        except ClientGone:
            state["code"] = CLIENT_CLOSED
            return
        if sink.detached is not None:
            await sink.detached(scope, receive, send)


class HttpSink(Sink):
    """Sends one request's output to its client.

    The status of a stream is sent with its first event or comment. Before that, an error is sent as a plain HTTP error.
    """

    def __init__(self, scope: Scope, send: Send, make_renderer: MakeRenderer, comment_s: float, logs_access: bool) -> None:
        """Prepares to send the response.

        Args:
            comment_s: Seconds of silence after which a stream gets a comment; 0 sends none.
            logs_access: Whether to note the request's tokens and times for the access log.
        """
        self.detached: Respond | None = None  # response of a request that is computed in the background; the caller sends it
        self._scope = scope
        self._send_message = send
        self._make_renderer = make_renderer
        self._comment_s = comment_s
        self._logs_access = logs_access
        self._form = scope["state"].get("form", OPENAI)
        self._running: RunningRequest | None = None
        self._collected: CollectedAnswer | None = None  # set if the response is sent whole
        self._renderer: StreamRenderer | None = None  # set if the response is a stream
        self._silence: Silence | None = None  # set if the response is a stream
        self._last = b""  # last output of a stream; end() sends it together with the ending
        self._started = False  # whether the HTTP status has been sent
        self._streams = False  # whether the HTTP status was sent as the beginning of a stream

    def open(self, running: RunningRequest) -> None:
        self._running = running
        self._scope["state"][OMITTED_TOOLS] = running.origin.omitted_tools

    async def while_preparing(self, work: Awaitable[T]) -> T:
        return await with_comments(work, self._comment_s, self._comment)

    async def begin(self, prepared: GenerationRequest, texts: TokenTexts) -> bool:
        running = self._request
        self._scope["state"]["model"] = prepared.model.name
        renderer = self._make_renderer(running, int(time.time()), prepared.model.name, texts)
        if isinstance(renderer, Detached):
            self.detached = await renderer.detach(prepared, running.hand_over())
            return False
        if running.params.stream:
            assert isinstance(renderer, StreamRenderer)
            self._renderer = renderer
            self._silence = Silence(self._comment_s, running.nudge)
            return True
        made = renderer
        self._collected = CollectedAnswer(self._form, lambda *_: made)
        self._collected.open(running)
        return await self._collected.begin(prepared, texts)

    async def queued(self) -> None:
        """Sends nothing; the first output or comment sends the status."""

    async def take(self, deltas: Sequence[Delta], more: bool) -> None:
        if self._collected is not None:
            await self._collected.take(deltas, more)
            return
        assert self._renderer is not None and self._silence is not None
        content = b"".join([await self._renderer.chunk(delta) for delta in deltas])
        if not more:
            self._last = content
            return
        if deltas:
            await self._start_stream()
        if content:  # empty if the whole output is hidden
            await self._send(content, False)
            self._silence.restart()
        elif self._silence.is_long:
            await self._comment()
            self._silence.restart()

    async def end(self) -> None:
        if self._collected is not None:
            await self._collected.end()
            await self._start(self._collected.status, self._collected.headers)
            await self._send(self._collected.body, True)
            return
        assert self._renderer is not None
        content = self._last + await self._renderer.ending()
        await self._start_stream()
        await self._send(content, True)

    async def fail(self, error: ApiError) -> None:
        """Sends the error as the response if nothing has been sent, else as the last event of the stream.

        If a part of a response that is no stream has been sent, closes the connection instead. Also closes the connection if
        the client does not read the error within ERROR_SEND_S.
        """
        self._end_silence()
        state = self._scope["state"]
        state[ERROR_CODE] = error.code
        try:
            async with asyncio.timeout(ERROR_SEND_S):
                if self._started and not self._streams:
                    self._cut()
                elif self._started:
                    await self._send_message({"type": "http.response.body", "body": self._event_of(error), "more_body": False})
                else:
                    status, headers, body = self._form.answer(error, self._request.request_id)
                    await self._start(status, headers)
                    await self._send_message({"type": "http.response.body", "body": body, "more_body": False})
        except TimeoutError:
            about = fields(**self._request.origin.log_fields, status=error.status)
            logger.warning("closed a connection, because its client did not read the error response", extra=about)
            self._cut()

    def released(self, running: RunningRequest) -> None:
        self._end_silence()
        if self._logs_access:
            self._scope["state"].update(generation_state(running))

    @property
    def _request(self) -> RunningRequest:
        assert self._running is not None
        return self._running

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.end()

    def _cut(self) -> None:
        self._scope["state"][CUT] = True
        cut(self._scope)

    def _event_of(self, error: ApiError) -> bytes:
        if self._renderer is not None:
            return self._renderer.failure(error)
        return bytes(self._form.event_of(error, self._request.request_id))

    async def _comment(self) -> None:
        if self._request.origin.wants_stream:
            await self._start_stream()
            await self._send(self._form.comment, False)

    async def _start_stream(self) -> None:
        """Sends the status of a stream if it has not been sent.

        A comment can start the stream before the request is prepared. The renderer's headers are then unknown and omitted.
        """
        if not self._started:
            self._streams = True
            await self._start(200, [*SSE_HEADERS, *headers_of(self._renderer)])

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._started = True
        if self._request.trace is not None:
            self._request.trace.first_byte(status)
        await self._send_message({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def _send(self, piece: bytes, last: bool) -> None:
        """Sends a part of the body.

        If the last part is larger than READ_AHEAD_BYTES, the end of the response is sent only after the client has read most of
        that part. So the request's deadline covers the time that the client takes to read.
        """
        if last and len(piece) > READ_AHEAD_BYTES:
            await self._send_message({"type": "http.response.body", "body": piece, "more_body": True})
            piece = b""
        await self._send_message({"type": "http.response.body", "body": piece, "more_body": not last})


def _trace_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): headers[name].decode("latin-1") for name in (b"traceparent", b"tracestate") if name in headers}


def send_while_read(scope: Scope, send: Send) -> Send:
    """Returns a function that sends messages as `send` does, and limits the time for which the client does not read.

    If a message waits for the client for UNREAD_S, the function closes the connection and raises ClientGone.
    """

    async def limited(message: Message) -> None:
        try:
            async with asyncio.timeout(UNREAD_S):
                await send(message)
        except TimeoutError:
            scope["state"][CUT] = True
            cut(scope)
            raise ClientGone from None

    return limited


def json_response(content: Any, status: int = 200) -> Response:
    """Returns a response whose body is `content` as JSON, for operations that do not generate."""
    return Response(orjson.dumps(content), status, media_type="application/json")
