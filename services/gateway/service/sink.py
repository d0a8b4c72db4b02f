"""The interface between a generation request and the receiver of its output.

The receiver is an HTTP response, a batch line, a background response or a health probe. The service calls these methods:

    open ─► while_preparing ─► begin ─► queued ─► take … take ─► end
      │            │             │         │          │           │
      └────────────┴─────────────┴────┬────┴──────────┴───────────┘
                                      ▼ ApiError
                                    fail                    released, last, on every path

The service calls one method at a time, from the request's task. A method that waits delays only its own request.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from rootstock_llm.services.gateway.generation.bodies import Gone, RequestBody
from rootstock_llm.services.gateway.generation.choice import Delta
from rootstock_llm.services.gateway.generation.errors import AnswerForm, ApiError, Headers
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest
from rootstock_llm.services.gateway.generation.running import KeyAdmission, RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts

T = TypeVar("T")
Respond = Callable[[Any, Any, Any], Awaitable[None]]  # an ASGI application: scope, receive, send
Prepare = Callable[[RequestBody, Origin], Awaitable[GenerationRequest]]  # raises ApiError
ReadBody = Callable[[RequestBody], Awaitable[None]]  # gives the body its content; raises ApiError, ClientGone


async def no_body(_body: RequestBody) -> None:
    """Reads no body, for a call whose `prepare` needs none."""


async def wait_forever() -> None:
    """Waits until cancelled. Calls without a client connection use it as `gone`."""
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A call of a generating operation."""

    origin: Origin
    prepare: Prepare  # parses the body, tokenizes the prompts and checks them against the model
    read_body: ReadBody = no_body
    gone: Gone = wait_forever  # returns when the client has closed its connection
    admission: KeyAdmission | None = None  # admission by the API key's limits; None: the service admits the call
    wants_report: bool = False  # whether the client requests a report; see report_of()
    avoid: Collection[str] = ()  # addresses of workers that get the request only if no other worker takes requests


class Sink(ABC):
    """The receiver of one request's output.

    After the output, one of `end` and `fail` is called, and then `released`. If begin() returns False or the client has left,
    only `released` is called. If an async method raises ApiError, the request is cancelled, and `fail` receives the error.
    """

    @abstractmethod
    def open(self, running: RunningRequest) -> None:
        """Receives the request before its body is read."""

    async def while_preparing(self, work: Awaitable[T]) -> T:
        """Awaits the preparation of the request and returns its result. A stream may send comments until then."""
        return await work

    @abstractmethod
    async def begin(self, prepared: GenerationRequest, texts: TokenTexts) -> bool:
        """Receives the prepared request. Its choices exist but are not queued yet.

        Returns:
            False if the sink has taken over the request with RunningRequest.hand_over(). The service then does not dispatch it.
        """

    @abstractmethod
    async def queued(self) -> None:
        """Called when every choice is on a worker or waits for a worker."""

    @abstractmethod
    async def take(self, deltas: Sequence[Delta], more: bool) -> None:
        """Receives new output.

        Args:
            deltas: New output of the choices. Empty if RunningRequest.nudge() has ended the wait for output.
            more: False if these are the last deltas; `end` is called next.
        """

    @abstractmethod
    async def end(self) -> None:
        """Called when every choice has ended, and `take` has received all output."""

    @abstractmethod
    async def fail(self, error: ApiError) -> None:
        """Called when the request has failed."""

    @abstractmethod
    def released(self, running: RunningRequest) -> None:
        """Called after the request was released, in every case, even if the client has closed its connection."""


class Renderer(Protocol):
    """Makes one request's response, for one operation."""

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        """Returns the whole body. `deltas` has one delta per choice, in order of the index. Raises ApiError."""


class HeaderRenderer(ABC):
    """A renderer that adds headers to its response.

    It is an abstract class, because isinstance() is slow for a runtime protocol: 8.5 µs per response.
    """

    @property
    @abstractmethod
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Headers of the response. The sink reads them before the first chunk of a stream, or after document()."""


@runtime_checkable
class StreamRenderer(Renderer, Protocol):
    """A renderer of an operation that can stream. Each method returns complete events."""

    async def chunk(self, delta: Delta) -> bytes:
        """Returns the events of a delta; b"" if the client sees none of its output. Raises ApiError."""

    async def ending(self) -> bytes:
        """Returns the events that follow the last chunk. Raises ApiError."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the event that ends a stream in place of its remaining output."""


class Detached(ABC):
    """Replaces the renderer of a request that is computed in the background, independently of its client's connection."""

    @abstractmethod
    async def detach(self, prepared: GenerationRequest, admission: KeyAdmission | None) -> Respond:
        """Returns the response to the client. Takes ownership of the admission, even if it raises ApiError."""


# Arguments: the request, its Unix time in seconds, the model's name, the texts of tokens.
MakeRenderer = Callable[[RunningRequest, int, str, TokenTexts], Renderer | Detached]


class CollectedAnswer(Sink):
    """Collects a whole response. Batch lines and HTTP responses that are not streams use it, so both have the same bytes."""

    def __init__(self, form: AnswerForm, make_renderer: MakeRenderer) -> None:
        """Prepares to collect. `form` renders errors in the form of the API."""
        self.status = 0  # HTTP status; 0 until the response is complete
        self.headers: Headers = []
        self.body = b""
        self.code = ""  # error code; "" without an error
        self._form = form
        self._make_renderer = make_renderer
        self.running: RunningRequest | None = None  # unset until the service opens the request
        self._renderer: Renderer | None = None
        self._deltas: Sequence[Delta] = ()

    def open(self, running: RunningRequest) -> None:
        self.running = running

    async def begin(self, prepared: GenerationRequest, texts: TokenTexts) -> bool:
        assert self.running is not None
        renderer = self._make_renderer(self.running, int(time.time()), prepared.model.name, texts)
        assert not isinstance(renderer, Detached), "a collected response is not computed in the background"
        self._renderer = renderer
        return True

    async def queued(self) -> None:
        """Ignores the queue; the response is collected whole."""

    async def take(self, deltas: Sequence[Delta], more: bool) -> None:
        if not more:
            self._deltas = deltas

    async def end(self) -> None:
        assert self._renderer is not None
        body = await self._renderer.document(self._deltas)
        self.headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *headers_of(self._renderer),
        ]
        self.status, self.body = 200, body

    async def fail(self, error: ApiError) -> None:
        assert self.running is not None
        self.code = error.code or ""
        self.status, self.headers, self.body = self._form.answer(error, self.running.request_id)

    def released(self, running: RunningRequest) -> None:
        """Releases nothing, because the collected response stays readable."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The functions of a generating operation. Requests share an operation if its functions have no state of a request."""

    prepare: Prepare
    make_renderer: MakeRenderer


MakeOperation = Callable[[], Operation]  # called once for each request


def stateless(operation: Operation) -> MakeOperation:
    """Returns a function that returns this operation for every request."""
    return lambda: operation


RunGeneration = Callable[[GenerationCall, Sink], Awaitable[None]]  # GenerationService.run


def headers_of(renderer: Renderer | None) -> Sequence[tuple[bytes, bytes]]:
    return renderer.headers if isinstance(renderer, HeaderRenderer) else ()


class Silence:
    """Measures the time since the last output of a stream. After a limit, wakes the stream's task."""

    def __init__(self, limit_s: float, wake: Callable[[], None]) -> None:
        """Starts the timer. restart() is cheap, because it sets no new timer while the current one runs.

        Args:
            limit_s: Seconds of silence after which the task is woken; 0 never wakes it.
            wake: Called on the event loop after the silence, at most once between two calls of restart().
        """
        self._limit_s = limit_s
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(limit_s, self._check) if limit_s else None
        self.is_long = False

    def restart(self) -> None:
        """Restarts the measurement after the stream has sent output."""
        if self._timer is None:
            return
        self._since = self._loop.time()
        if self.is_long:
            self.is_long = False
            self._timer = self._loop.call_at(self._since + self._limit_s, self._check)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        until = self._since + self._limit_s
        if self._loop.time() < until:
            self._timer = self._loop.call_at(until, self._check)
        else:
            self.is_long = True
            self._wake()


async def with_comments(work: Awaitable[T], silence_s: float, comment: Callable[[], Awaitable[None]]) -> T:
    """Returns the result of `work`, or raises its exception.

    Args:
        comment: Called every `silence_s` seconds while `work` runs. Never called if `silence_s` is 0.
    """
    if not silence_s:
        return await work
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((task,), timeout=silence_s))[0]:
            await comment()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
