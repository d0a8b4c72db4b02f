"""Records the times of traced requests, and creates their spans when they have ended.

arrived() is called on the asyncio loop before the request is put into the inbox. All other calls come from the scheduler's
thread, which only records times. Spans are created on the asyncio loop. Trace events of the core become span events.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rootstock_llm.services.worker.core.contracts.messages import (
    ErrorCode,
    Finish,
    FinishReason,
    PeerOutput,
    TraceEvent,
    TraceKind,
)
from rootstock_llm.services.worker.core.planning.step_rows import Extend

if TYPE_CHECKING:
    from rootstock_llm.services.shared.observe.spans import Span, Tracing

MAX_TRACED = 16384  # largest number of open traced requests; while so many are open, new requests are not traced
MAX_CHUNKS = 256  # largest number of chunk spans of one request; the attribute rootstock.chunks counts all its chunks
MAX_EVENTS = 64  # largest number of recorded events of one request
_EVENTS = (
    TraceKind.GATED,
    TraceKind.UNGATED,
    TraceKind.IMPORTING,
    TraceKind.IMPORTED,
    TraceKind.RETRACTED,
    TraceKind.PREEMPTED,
)
_CALLER_ERRORS = (ErrorCode.CANCELLED, ErrorCode.INVALID_ARGUMENT)  # errors that the caller caused; their spans do not fail
_REFILLS = (TraceKind.RETRACTED, TraceKind.PREEMPTED)  # events after which the request is admitted and prefilled again


@dataclass(slots=True)
class Chunk:
    """A chunk of a request's prefill."""

    launched: float  # time at which the chunk's step was launched
    start: int  # position of its first token
    tokens: int
    cached: int  # tokens of the prefix hit if this is the first chunk after an admission; otherwise 0
    ended: float = 0.0  # time at which the chunk's step was committed; 0: the step was not committed yet


@dataclass(slots=True)
class TracedRequest:
    """The recorded times of one request, in seconds on the scheduler loop's clock."""

    request_id: str
    traceparent: str
    resumed_tokens: int  # output tokens that another worker sampled before this worker continued the request
    arrived: float
    wall_ns: int  # Unix time minus the scheduler loop's clock, in nanoseconds
    first_step: float = 0.0  # launch of the request's first step; 0: no step was launched yet
    first_token: float = 0.0  # time at which the first output tokens were sent to the gateway; 0: none were sent yet
    refills: bool = True  # whether the next chunk is the first after an admission
    num_chunks: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)

    def unix_ns(self, at: float) -> int:
        return int(at * 1e9) + self.wall_ns


class RequestSpans:
    """The traced requests that have not ended."""

    def __init__(self, tracing: Tracing, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        """Stores the objects that create spans.

        Args:
            tracing: creates spans.
            loop: the asyncio loop, on which spans are created.
            clock: the clock of the scheduler's loop.
        """
        self._tracing = tracing
        self._loop = loop
        self._clock = clock
        self._open: dict[tuple[int, int], TracedRequest] = {}  # by (gateway stream, handle)
        # The open requests by request id. A replay or a hedge has the request id of the request that it repeats.
        self._by_request_id: dict[str, list[TracedRequest]] = {}
        self._by_request_id_lock = threading.Lock()
        self._uncommitted: dict[int, list[Chunk]] = {}  # chunks of uncommitted steps, by step id

    @property
    def num_open(self) -> int:
        return len(self._open)

    def arrived(self, peer: int, handle: int, request_id: str, traceparent: str, resumed_tokens: int) -> None:
        """Starts to record a request if its traceparent has the flag `sampled`.

        Args:
            traceparent: W3C trace context; empty for an untraced request.
            resumed_tokens: output tokens that another worker sampled before.
        """
        if traceparent and traceparent[-1] in "13579bdf" and len(self._open) < MAX_TRACED:
            now = self._clock()
            wall_ns = time.time_ns() - int(now * 1e9)
            request = TracedRequest(request_id, traceparent, resumed_tokens, now, wall_ns)
            with self._by_request_id_lock:
                self._by_request_id[request_id] = [*self._by_request_id.get(request_id, ()), request]
            self._open[peer, handle] = request

    def launched(self, step_id: int, extends: Sequence[Extend], at: float) -> None:
        """Records the extend rows of a launched step."""
        chunks = [self._chunk(self._open[key], extend, at) for extend in extends if (key := extend.key) in self._open]
        if chunks:
            self._uncommitted[step_id] = chunks

    @staticmethod
    def _chunk(request: TracedRequest, extend: Extend, at: float) -> Chunk:
        chunk = Chunk(at, extend.start, extend.tokens, extend.start if request.refills else 0)
        request.refills = False
        request.first_step = request.first_step or at
        request.num_chunks += 1
        if len(request.chunks) < MAX_CHUNKS:
            request.chunks.append(chunk)
        return chunk

    def committed(self, step_id: int) -> None:
        """Records that a step was committed or has failed."""
        chunks = self._uncommitted.pop(step_id, ())
        if chunks:
            now = self._clock()
            for chunk in chunks:
                chunk.ended = now

    def happened(self, events: Sequence[TraceEvent]) -> None:
        """Records the trace events of traced requests.

        Args:
            events: trace events of all requests, ordered by time. Events of untraced requests are skipped.
        """
        for event in events:
            if event.kind in _EVENTS:
                for request in self._by_request_id.get(event.request_id, ()):
                    if event.at >= request.arrived:
                        request.refills |= event.kind in _REFILLS
                        if len(request.events) < MAX_EVENTS:
                            request.events.append(event)

    def sent(self, outputs: tuple[PeerOutput, ...]) -> None:
        """Records the outputs of an iteration of the loop.

        If the outputs have a request's finish, all events of the request must have been passed to happened() before.
        """
        if not self._open:
            return
        now = self._clock()
        for peer in outputs:
            for handle in peer.handles:
                request = self._open.get((peer.peer, handle))
                if request is not None and not request.first_token:
                    request.first_token = now
            for finish in peer.finishes:
                request = self._open.pop((peer.peer, finish.handle), None)
                if request is not None:
                    self._forget(request)
                    self._loop.call_soon_threadsafe(self._create_spans, request, finish, now)

    def _forget(self, request: TracedRequest) -> None:
        with self._by_request_id_lock:
            others = [other for other in self._by_request_id[request.request_id] if other is not request]
            if others:
                self._by_request_id[request.request_id] = others
            else:
                del self._by_request_id[request.request_id]

    def _create_spans(self, request: TracedRequest, finish: Finish, ended: float) -> None:
        at = request.unix_ns
        name = {"rootstock.request_id": request.request_id}
        span = self._tracing.under("generate", request.traceparent, name, at(request.arrived))
        if span is None:
            return
        queue = span.child("queue", start_ns=at(request.arrived))
        queue.end(at(request.first_step or ended))
        for number, chunk in enumerate(request.chunks):
            _create_chunk_span(span, number, chunk, request, ended)
        decode = None
        if request.first_token:
            tokens = finish.completion_tokens - request.resumed_tokens
            counts = {"rootstock.output_tokens": tokens, "rootstock.retractions": finish.retractions}
            decode = span.child("decode", counts, at(request.first_token))
        for event in request.events:
            owner = decode if decode is not None and event.at >= request.first_token else span
            owner.event(event.kind.value, {"rootstock.tokens": event.detail}, at(event.at))
        if decode is not None:
            decode.end(at(ended))
        _close(span, request, finish)
        span.end(at(ended))


def _create_chunk_span(parent: Span, number: int, chunk: Chunk, request: TracedRequest, ended: float) -> None:
    attributes = {
        "rootstock.chunk.number": number,
        "rootstock.chunk.start": chunk.start,
        "rootstock.chunk.tokens": chunk.tokens,
        "rootstock.cached_tokens": chunk.cached,
    }
    span = parent.child("prefill", attributes, request.unix_ns(chunk.launched))
    span.end(request.unix_ns(chunk.ended or ended))


def _close(span: Span, request: TracedRequest, finish: Finish) -> None:
    span.set(
        {
            "rootstock.finish_reason": finish.reason.name.lower(),
            "rootstock.prompt_tokens": finish.prompt_tokens,
            "rootstock.cached_tokens": finish.cached_tokens,
            "rootstock.output_tokens": finish.completion_tokens,
            "rootstock.resumed_tokens": request.resumed_tokens,
            "rootstock.retractions": finish.retractions,
            "rootstock.chunks": request.num_chunks,
        }
    )
    if finish.reason is FinishReason.ABORT:
        if finish.error in _CALLER_ERRORS:
            span.set({"error.type": finish.error.name})
        else:
            span.fail(finish.error.name, finish.message)
