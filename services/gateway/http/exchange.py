"""A generation request from its first byte to its last, as one plain ASGI answer: read, check, tokenize, dispatch, render.

The connection is watched from the moment the body is read. When the client goes, the request's task is cancelled wherever it
stands, and closing the request frees everything downstream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.config.settings import GatewaySettings
from services.gateway.http.body import attended, cut, gone_of, held_body, read_body
from services.gateway.http.body_budget import BodyBudget, ClientGone, HeldBytes
from services.gateway.http.renderer import Admitted, Detached, HeaderRenderer, Narrator, Prepare, Renderer, StreamRenderer
from services.gateway.http.sse_comments import Silence, commented
from services.gateway.keys.key_ring import KeyRing
from services.gateway.observe.access_log import CUT, ERROR_CODE, WORK, AccessLog, Work
from services.gateway.observe.attendance import Attendance
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers.token_texts import ModelTexts, TokenTexts
from services.gateway.playground.report import Report, report_for
from services.gateway.request import budgets
from services.gateway.request.abort import AbortScope
from services.gateway.request.bodies import ReceivedBody
from services.gateway.request.caller import NOBODY
from services.gateway.request.errors import CLIENT_CLOSED, OPENAI, ApiError, bad_request, internal, timed_out, unavailable
from services.gateway.request.generation import Plan
from services.gateway.request.origin import OMITTED_TOOLS
from services.gateway.request.request import Choice, ClientRequest, Phase, Releaser
from services.gateway.request.trace import RequestTrace, begin_trace
from services.gateway.request.usage import usage_of
from services.shared import limits
from services.shared.observe.log_fields import fields

if TYPE_CHECKING:
    from services.shared.observe.spans import Tracing

logger = logging.getLogger(__name__)

READ_AHEAD_BYTES = 1 << 16  # of an answer, which a client may leave unread for a while
ERROR_SEND_S = 0.5  # for telling an error to a client that may have stopped reading
ROUTING_KEY_HEADER = b"x-smg-routing-key"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


# request, created (Unix seconds), model
MakeRenderer = Callable[[ClientRequest, int, str, ModelTexts], Renderer | Narrator | Detached]


class Dispatch(Releaser, Protocol):
    """Who has choices computed."""

    def start(self, request: ClientRequest) -> None:
        """Raises ApiError when there is no room for it."""

    def abort(self, choice: Choice) -> bool:
        """Ends it with what has come so far. False for one that has ended."""

    def worker_ids(self, choice: Choice) -> list[str]:
        """Of those that it is on."""


class Generator:
    """Knows all generation requests that are open. One per process."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatch,
        token_texts: TokenTexts,
        metrics: GatewayMetrics,
        bodies: BodyBudget,
        keys: KeyRing,
        tracing: Tracing | None = None,
        access: AccessLog | None = None,
    ) -> None:
        self.settings = settings
        self.dispatcher = dispatcher
        self.token_texts = token_texts
        self.metrics = metrics
        self.bodies = bodies
        self.keys = keys
        self._tracing = tracing
        self.access = access or AccessLog("off")
        self._open: dict[Exchange, None] = {}
        self._num_reading = 0  # of those that generate nothing
        self.attendance = Attendance(asyncio.get_running_loop().time)
        metrics.in_flight.set_function(lambda: float(len(self._open)))

    def admit(self, exchange: Exchange) -> None:
        """Raises ApiError when too many requests are open."""
        if len(self._open) >= self.settings.max_concurrent_requests:
            raise self._full()
        self._open[exchange] = None
        self.attendance.begin(exchange.is_attended)

    def _full(self) -> ApiError:
        return unavailable("Too many requests are in flight.", self.settings.retry_after_s, "queue_full")

    @asynccontextmanager
    async def body_of(
        self, scope: Scope, receive: Receive, max_bytes: int = limits.MAX_BODY_BYTES
    ) -> AsyncIterator[ReceivedBody]:
        """Of a request that generates nothing; its bytes are held in the budget while the block runs, which ends with its client.
        As many of these as of others may be open. Raises ApiError."""
        max_bytes = min(max_bytes, self.settings.max_body_bytes)
        if self._num_reading >= self.settings.max_concurrent_requests:
            raise self._full()
        self._num_reading += 1
        try:
            held = held_body(scope, receive, self.bodies, max_bytes, self.settings.body_timeout_s)
            async with held as body, attended(scope, receive):
                yield body
        except ClientGone:
            raise ApiError(CLIENT_CLOSED, "The client closed its connection.") from None
        finally:
            self._num_reading -= 1

    def trace(self, scope: Scope) -> RequestTrace | None:
        """A request's spans begin. None: it is not traced."""
        return None if self._tracing is None else begin_trace(self._tracing, scope)

    def course(self, scope: Scope) -> Report | None:
        """What becomes of a request is kept from here on. None: nobody asks, or may ask."""
        return report_for(scope) if self.settings.playground else None

    def forget(self, exchange: Exchange) -> None:
        if exchange in self._open:
            del self._open[exchange]
            self.attendance.end(exchange.is_attended)

    def abort(self, scope: AbortScope, error: ApiError) -> int:
        """Ends what is meant, see Exchange.abort; returns how many answers that were."""
        return sum(exchange.abort(scope, error) for exchange in list(self._open))

    @property
    def idle(self) -> bool:
        return not self._open

    def end_all(self, error: ApiError) -> None:
        """Ends every open request with this error."""
        for exchange in list(self._open):
            exchange.interrupt(error)


class Exchange(Response):
    """One request and its answer. FastAPI hands it the raw ASGI channel, because it returns it as a response."""

    background = None

    def __init__(
        self,
        generator: Generator,
        prepare: Prepare,
        make_renderer: MakeRenderer,
        admission: Admitted | None = None,
        failed: Callable[[ApiError], None] | None = None,
    ) -> None:
        """admission: of a request that has been admitted already. failed: told the request's error in the client's place."""
        # Not Response.__init__: there is no content yet, and headers are written with the first byte.
        self._generator = generator
        self._prepare = prepare
        self._make_renderer = make_renderer
        self._started = self._streams = False  # the answer's status is out, as a stream's
        self._work: asyncio.Task[Any] | None = None  # what serves it
        self._request: ClientRequest | None = None
        self._held: HeldBytes | None = None
        self._admission = admission
        self._failed = failed
        self._is_admitted = admission is not None
        self._detached: Response | None = None  # answers in its place
        self._form = OPENAI
        self._usage: dict[str, Any] | None = None  # of a complete response
        self._stream_renderer: StreamRenderer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generator = self._generator
        state, trace = scope["state"], generator.trace(scope)
        self._form = state.get("form", OPENAI)
        caller, course = state.get("caller", NOBODY), generator.course(scope)
        request = ClientRequest(state["request_id"], generator.dispatcher, generator.metrics, caller, trace, course)
        self._request = request
        state[OMITTED_TOOLS] = request.origin.omitted_tools
        self._held = held = generator.bodies.open(gone_of(scope))
        try:
            generator.admit(self)
            if self._admission is None:
                self._admission = generator.keys.begin(request.key)
            body = await read_body(scope, receive, held, generator.settings.max_body_bytes, generator.settings.body_timeout_s)
        except ApiError as error:
            await self._tell(error, scope, send)
        except ClientGone:
            self._client_gone(scope)
        else:
            await self._answer(scope, body, receive, send)
        finally:
            generator.forget(self)
            held.close()
            if generator.access.enabled:
                state[WORK] = _work_of(request, self._usage)
            if self._admission is not None:
                self._admission.end(request.tokens_used)
            if trace is not None:
                trace.end()
        if self._detached is not None:
            await self._detached(scope, receive, send)

    async def _answer(self, scope: Scope, body: ReceivedBody, receive: Receive, send: Send) -> None:
        self._work = work = asyncio.current_task()
        assert work is not None

        try:
            async with attended(scope, receive, lambda: self._client_gone(scope)):
                await self._serve(scope, body, send)
        except ClientGone:
            self._detached = None  # nobody is there to read it

    @property
    def is_attended(self) -> bool:
        """Somebody waits for the answer."""
        return self._request is None or not self._request.caller.background

    def _client_gone(self, scope: Scope) -> None:
        assert self._request is not None
        scope["state"]["code"] = CLIENT_CLOSED
        self._generator.metrics.aborts.labels(self._request.phase.value).inc()
        if self._request.trace is not None:
            self._request.trace.client_gone()
        logger.info("client gone", extra=fields(**self._request.origin.log_fields, phase=self._request.phase.value))
        self._request.close()

    def interrupt(self, error: ApiError) -> None:
        """Ends the request with `error`, whatever it is waiting for."""
        if self._request is not None:
            self._request.fail(error)
            if self._work is not None and self._request.phase is Phase.ACCEPTED:
                self._work.cancel()

    def abort(self, scope: AbortScope, error: ApiError) -> int:
        """Ends the choices that are meant: what has come so far is their answer. Where there is nothing to show, because there
        are no choices yet, or they are vectors or scores, the request ends with `error`. Returns how many answers have ended."""
        request = self._request
        if request is None or request.error is not None or not scope.owns(request.key):
            return 0
        whole = (request.request_id, *request.origin.names)
        if request.phase is Phase.ACCEPTED:
            if not scope.on(()) or not scope.names(*whole, *request.origin.part_names):
                return 0
            self.interrupt(error)
            return 1
        named = (each for each in request.choices if scope.names(*whole, each.part.request_id, each.request_id))
        dispatcher = self._generator.dispatcher
        meant = [each for each in named if scope.on(dispatcher.worker_ids(each))]
        if meant and request.generation.ends_with_prompt:
            request.fail(error)
            return int(request.error is not None)
        return sum(dispatcher.abort(choice) for choice in meant)

    async def _serve(self, scope: Scope, body: ReceivedBody, send: Send) -> None:
        request = self._request
        assert request is not None
        error: ApiError | None = None
        try:
            async with asyncio.timeout(self._generator.settings.request_timeout_s):
                await self._generate(scope, request, body, send)
        except ApiError as failure:
            error = _alone(failure)
        except TimeoutError:
            error = timed_out()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if request.error is None and (task is None or task.cancelling()):
                raise
            if request.error is None:
                logger.error("a request was cancelled, and nobody had asked for it", extra=fields(**request.origin.log_fields))
            error = request.error or internal()  # interrupted, and the client is still there
        except Exception:
            logger.exception("request failed", extra=fields(**request.origin.log_fields))
            error = internal()
        finally:
            request.close()
        if error is not None:
            await self._tell(error, scope, send)

    async def _generate(self, scope: Scope, request: ClientRequest, body: ReceivedBody, send: Send) -> None:
        key = _routing_key(scope)
        plan = await self._begin(request, body, key, send)
        scope["state"]["model"] = plan.model.name
        texts = self._generator.token_texts.of_model(plan.model.source, plan.model.tokenizer)
        renderer = self._make_renderer(request, int(time.time()), plan.model.name, texts)
        if isinstance(renderer, Detached):
            admission, self._admission = self._admission, None
            self._generator.forget(self)  # its place is for who computes it
            self._detached = await renderer.detach(plan, admission)
            return
        self._generator.dispatcher.start(request)
        assert self._held is not None
        self._held.close()
        if isinstance(renderer, Narrator):
            await renderer.narrate(request)
            self._count(request)
        elif request.generation.stream:
            assert isinstance(renderer, StreamRenderer)
            self._stream_renderer = renderer
            await self._stream(request, renderer, send)
        else:
            await self._send_document(request, renderer, send)

    async def _begin(self, request: ClientRequest, body: ReceivedBody, key: str, send: Send) -> Plan:
        """Raises ApiError."""
        try:
            preparing = self._prepare(body, request.origin)
            plan = await commented(preparing, self._generator.settings.sse_comment_s, lambda: self._comment(request, send))
            if key:
                plan = plan.routed(key)
            if request.error is not None:
                raise request.error
            self._count_cuts(request, plan)
            budgets.check_logprobs(plan.parts, plan.model.context_len)
            if self._admission is not None and not self._is_admitted:
                self._admission.reserve(budgets.most_tokens(plan.parts, plan.model.context_len))
            request.begin(plan.parts, plan.model)
            if request.trace is not None:
                request.trace.begin(plan.model.name, len(request.choices))
        except (ValueError, OverflowError):
            # Every field has its check; this is for a value that passed and does not fit its protobuf message.
            logger.warning("a value does not fit its message", extra=fields(**request.origin.log_fields), exc_info=True)
            raise bad_request(None, "A value of the request is out of its range.") from None
        return plan

    def _count_cuts(self, request: ClientRequest, plan: Plan) -> None:
        cuts = [part.prompt.num_cut for part in plan.parts if part.prompt.num_cut]
        if cuts:
            self._generator.metrics.truncated_prompts.inc(len(cuts))
            logger.info("prompts were cut", extra=fields(**request.origin.log_fields, prompts=len(cuts), tokens=sum(cuts)))

    async def _stream(self, request: ClientRequest, renderer: StreamRenderer, send: Send) -> None:
        """The status goes out with the first chunk or comment, so that an error before it is a plain HTTP error."""
        last = False
        silence = Silence(self._generator.settings.sse_comment_s, request.nudge)
        try:
            while not last:
                deltas = [delta for choice in await request.news() if (delta := choice.take()) is not None]
                last = request.complete  # before anything is awaited: what comes from here on has not been taken
                pieces = [await renderer.chunk(delta) for delta in deltas]
                if last:
                    self._count(request)
                    pieces.append(await renderer.ending())
                content = b"".join(pieces)  # empty where all that came is hidden
                if pieces:
                    await self._start_stream(send, renderer)
                if content or last:
                    await _send(content, last, send)
                    silence.said()
                elif silence.is_long:
                    await self._comment(request, send)
                    silence.said()
        finally:
            silence.end()

    async def _comment(self, request: ClientRequest, send: Send) -> None:
        if request.wants_stream:
            await self._start_stream(send)
            await _send(self._form.comment, False, send)

    async def _start_stream(self, send: Send, renderer: StreamRenderer | None = None) -> None:
        """renderer: None while the request is prepared; its headers are not known then."""
        if not self._started:
            self._streams = True
            await self._start(200, [*_SSE_HEADERS, *_headers_of(renderer)], send)

    async def _send_document(self, request: ClientRequest, renderer: Renderer, send: Send) -> None:
        await request.news()
        deltas = [delta for choice in request.choices if (delta := choice.take()) is not None]
        self._count(request)
        document = await renderer.document(deltas)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(document))]
        await self._start(200, [*headers, *_headers_of(renderer)], send)
        await _send(document, True, send)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        self._started = True
        if self._request is not None and self._request.trace is not None:
            self._request.trace.first_byte(status)
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _tell(self, error: ApiError, scope: Scope, send: Send) -> None:
        """As HTTP if nothing is out yet, else as the stream's last event. Where neither can be, the connection ends."""
        request = self._request
        assert request is not None
        if request.trace is not None:
            request.trace.failed(error)
        scope["state"][ERROR_CODE] = error.code
        if self._failed is not None:
            self._failed(error)
            return
        try:
            async with asyncio.timeout(ERROR_SEND_S):
                if self._started and not self._streams:
                    scope["state"][CUT] = True
                    cut(scope)
                elif self._started:
                    await send({"type": "http.response.body", "body": self._event_of(error), "more_body": False})
                else:
                    status, headers, body = self._form.answer(error, request.request_id)
                    await self._start(status, headers, send)
                    await send({"type": "http.response.body", "body": body, "more_body": False})
        except TimeoutError:
            logger.warning("client does not read its error", extra=fields(**request.origin.log_fields, status=error.status))
            scope["state"][CUT] = True
            cut(scope)

    def _event_of(self, error: ApiError) -> bytes:
        assert self._request is not None
        if self._stream_renderer is not None:
            return self._stream_renderer.failure(error)
        return self._form.event_of(error, self._request.request_id)

    def _count(self, request: ClientRequest) -> None:
        self._usage = usage = usage_of(request)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        since_arrival = request.clock() - request.arrived
        request.series.answered(usage["prompt_tokens"], cached, usage["completion_tokens"], since_arrival)
        if request.trace is not None:
            request.trace.answered(usage, [choice.ending.finish_reason for choice in request.choices if choice.ending])


async def _send(piece: bytes, last: bool, send: Send) -> None:
    """After a large last piece the end waits until the client has read it: so the request's deadline holds for that too."""
    if last and len(piece) > READ_AHEAD_BYTES:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        piece = b""
    await send({"type": "http.response.body", "body": piece, "more_body": not last})


def _headers_of(renderer: Renderer | None) -> Sequence[tuple[bytes, bytes]]:
    return renderer.headers if isinstance(renderer, HeaderRenderer) else ()


def _work_of(request: ClientRequest, usage: Mapping[str, Any] | None) -> Work:
    """Returns the request's tokens and times. usage: its usage if its response is complete; otherwise the output that has arrived
    counts."""
    ended = [ending for choice in request.choices if (ending := choice.ending) is not None]
    first_s = request.first_output_s if request.choices and request.choices[0].generates else None
    if usage is None:
        usage = usage_of(request)
        usage["prompt_tokens"] = sum(len(part.prompt.ids) for part in request.parts) if request.reached_worker else 0
        usage["completion_tokens"] = sum(len(choice.output.ids) for choice in request.choices)
    return Work(
        trace_id="" if request.trace is None else request.trace.trace_id,
        queue_ms=request.longest_wait_s * 1e3 + max([ending.queue_ms for ending in ended], default=0),
        ttft_ms=None if first_s is None else first_s * 1e3,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        output_tokens=usage["completion_tokens"],
        aborted="abort" in [ending.finish_reason for ending in ended],
    )


def _alone(error: ApiError) -> ApiError:
    """Without the frames that it came through: they hold what was made of the body, and the error would keep them."""
    error.__traceback__ = error.__context__ = None
    return error


def _routing_key(scope: Scope) -> str:
    """Raises ApiError."""
    key = dict(scope["headers"]).get(ROUTING_KEY_HEADER, b"")
    if len(key) > limits.MAX_ROUTING_KEY_CHARS:
        name = ROUTING_KEY_HEADER.decode()
        raise bad_request(name, f"'{name}' may have at most {limits.MAX_ROUTING_KEY_CHARS} characters.")
    return str(key, "latin-1")
