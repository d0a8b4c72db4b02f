"""The interface between a generation request and the receiver of its output: an HTTP response, a batch line, a background
response or a health probe.

    open ─► while_preparing ─► begin ─► queued ─► take … take ─► end
      │            │             │         │          │           │
      └────────────┴─────────────┴────┬────┴──────────┴───────────┘
                                      ▼ ApiError
                                    fail                    released, last, on every path

The service calls the methods one at a time, from the request's task. A method that waits delays its own request alone.
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
    """Reads nothing, for a call that is prepared without a body."""


async def never() -> None:
    """Waits until it is cancelled, for a call without a connection."""
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A call of a generating operation."""

    origin: Origin
    prepare: Prepare  # parses the body, tokenizes the prompts and checks them against the model
    read_body: ReadBody = no_body
    gone: Gone = never  # returns when the client has closed its connection
    admission: KeyAdmission | None = None  # admission by the API key's limits; None: the service admits the call
    wants_report: bool = False  # whether the client requests a report; see report_of()
    avoid: Collection[str] = ()  # addresses of workers that must not get the request


class Sink(ABC):
    """Receives the output of one request, then exactly one of `end` and `fail`, and last `released`.

    Every async method may raise ApiError: the request is then cancelled, and `fail` receives the error.
    """

    @abstractmethod
    def open(self, running: RunningRequest) -> None:
        """Receives the request before its body is read."""

    async def while_preparing(self, work: Awaitable[T]) -> T:
        """Awaits the preparation of the request and returns its result. A stream may send comments until then."""
        return await work

    @abstractmethod
    async def begin(self, prepared: GenerationRequest, texts: TokenTexts) -> bool:
        """Receives the prepared request. Its choices exist and are not queued yet.

        Returns:
            False if the sink has taken the request over with RunningRequest.hand_over(). The service then ends.
        """

    @abstractmethod
    async def queued(self) -> None:
        """Every choice is on a worker or waits for one."""

    @abstractmethod
    async def take(self, deltas: Sequence[Delta], more: bool) -> None:
        """Receives new output.

        Args:
            deltas: Empty if RunningRequest.nudge() has interrupted the wait.
            more: False if `end` follows at once.
        """

    @abstractmethod
    async def end(self) -> None:
        """Every choice has ended, and `take` has received everything."""

    @abstractmethod
    async def fail(self, error: ApiError) -> None:
        """The request has failed with this error."""

    @abstractmethod
    def released(self, running: RunningRequest) -> None:
        """The request has been released. The service calls this on every path, also if the client has left."""


class Renderer(Protocol):
    """Makes one request's response, for one operation."""

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        """Returns the whole body. `deltas` are those of all choices, by index. Raises ApiError."""


class HeaderRenderer(ABC):
    """A renderer that adds headers to its response.

    It is an abstract class, because an instance check against a runtime protocol takes 8.5 µs per response.
    """

    @property
    @abstractmethod
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Headers that are known now: of a stream before its first chunk, of a whole response once document() has returned."""


@runtime_checkable
class StreamRenderer(Renderer, Protocol):
    """A renderer of an operation that can stream. Each method returns complete events."""

    async def chunk(self, delta: Delta) -> bytes:
        """Returns the events of a delta; empty if the client sees nothing of it. Raises ApiError."""

    async def ending(self) -> bytes:
        """Returns the events that follow the last chunk. Raises ApiError."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the event that ends a stream in place of its remaining output."""


class Detached(ABC):
    """Replaces the renderer of a request that is computed in the background, independently of its client's connection."""

    @abstractmethod
    async def detach(self, prepared: GenerationRequest, admission: KeyAdmission | None) -> Respond:
        """Returns the response to the client. Owns the admission from now on, even if it raises ApiError."""


# running, created (Unix seconds), model, texts
MakeRenderer = Callable[[RunningRequest, int, str, TokenTexts], Renderer | Detached]


class CollectedAnswer(Sink):
    """Collects a whole response. Batch lines and HTTP responses that are not streams use it, so both have the same bytes."""

    def __init__(self, form: AnswerForm, make_renderer: MakeRenderer) -> None:
        """Prepares to collect. `form` renders errors in the form of the API."""
        self.status = 0  # HTTP status; 0 until the response is complete
        self.headers: Headers = []
        self.body = b""
        self.code = ""  # the error's code
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
        """Does nothing, because the response stays readable."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The functions of a generating operation. Requests share it if its functions have no state of a request."""

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
    """Measures the time since a stream last sent something. After a limit, it wakes the stream's task."""

    def __init__(self, of_s: float, wake: Callable[[], None]) -> None:
        """Starts the timer. One timer serves many events, because said() does not set it again.

        Args:
            of_s: Seconds of silence after which the task is woken; 0 for never.
            wake: Called on the event loop after the silence, once until the next said().
        """
        self._of_s = of_s
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(of_s, self._look) if of_s else None
        self.is_long = False

    def said(self) -> None:
        """Restarts the measurement, because the stream has sent something."""
        if self._timer is None:
            return
        self._since = self._loop.time()
        if self.is_long:
            self.is_long = False
            self._timer = self._loop.call_at(self._since + self._of_s, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        until = self._since + self._of_s
        if self._loop.time() < until:
            self._timer = self._loop.call_at(until, self._look)
        else:
            self.is_long = True
            self._wake()


async def commented(work: Awaitable[T], silence_s: float, comment: Callable[[], Awaitable[None]]) -> T:
    """Returns the work's result, or raises its exception. Meanwhile, calls `comment` every `silence_s` seconds; 0 for never."""
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
