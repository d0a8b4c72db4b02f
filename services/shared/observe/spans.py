"""Spans by OpenTelemetry's SDK, without its globals: one Tracing per process, handed to whoever makes spans.

A span is there only where it is sampled: everywhere else its owner holds None. Times are Unix nanoseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, StatusCode, Tracer, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

logger = logging.getLogger(__name__)

FLUSH_S = 1.0  # that a process waits at its end for its last spans to go out
SCOPE = "rootstock"
_W3C = TraceContextTextMapPropagator()

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


class Span:
    """One that is recorded. From any thread; what comes after the end is ignored."""

    def __init__(self, span: OtelSpan, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id)
        self.traceparent = f"00-{self.trace_id}-{format_span_id(context.span_id)}-{int(context.trace_flags):02x}"

    def child(self, name: str, attributes: Attributes | None = None, start_ns: int | None = None) -> Span:
        """Within this process."""
        return self._child(name, attributes, SpanKind.INTERNAL, start_ns)

    def client(self, name: str, attributes: Attributes | None = None) -> Span:
        """Around a call to another service, whose spans go under it."""
        return self._child(name, attributes, SpanKind.CLIENT, None)

    def _child(self, name: str, attributes: Attributes | None, kind: SpanKind, start_ns: int | None) -> Span:
        context = set_span_in_context(self._span, Context())
        return Span(self._tracer.start_span(name, context, kind, attributes, start_time=start_ns), self._tracer)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None, at_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.add_event(name, attributes, at_ns)

    def fail(self, error_type: str, message: str = "") -> None:
        """Its status is an error."""
        if self._span.is_recording():
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(StatusCode.ERROR, message or None)

    def end(self, at_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(at_ns)


class Tracing:
    """Makes spans and has them sent in the background. From any thread."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer(SCOPE)

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes | None = None) -> Span | None:
        """A server's span under the context that a client's `traceparent` and `tracestate` give, else the first of a trace of
        its own. None: not sampled, by the client's flag or else by the ratio."""
        return self._started(name, _W3C.extract(headers, Context()), attributes, None)

    def under(
        self, name: str, traceparent: str, attributes: Attributes | None = None, start_ns: int | None = None
    ) -> Span | None:
        """A server's span in the trace of another service. None where that is not sampled, or there is none."""
        if not traceparent:
            return None
        context = _W3C.extract({"traceparent": traceparent}, Context())
        if not context:
            return None
        return self._started(name, context, attributes, start_ns)

    def close(self) -> None:
        """Sends what is left, for at most FLUSH_S. Blocks."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(FLUSH_S)
        if last.is_alive():
            logger.warning("the last spans could not be sent within %.0f s", FLUSH_S)

    def _started(self, name: str, context: Context, attributes: Attributes | None, start_ns: int | None) -> Span | None:
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=start_ns)
        return Span(span, self._tracer) if span.is_recording() else None
