"""Makes spans with OpenTelemetry's SDK, without its global tracer provider, and exports them over OTLP/gRPC.

A process has one Tracing object, which is passed to the code that makes spans. Only sampled requests have spans; other requests
have None. Times are Unix nanoseconds. A thread exports spans in batches, and spans that cannot be sent are dropped.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, StatusCode, Tracer, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

FLUSH_S = 1.0  # longest time for sending the last spans when a process ends
MAX_QUEUED_SPANS = 16384  # largest number of unsent spans; if there are more, the oldest are dropped
MAX_BATCH_SPANS = 512
BATCH_MS = 500.0  # time after which an incomplete batch is sent
EXPORT_S = 5.0  # time for sending a batch, with retries; then the batch is dropped
TLS = "https://"
SCOPE = "rootstock"
_W3C = TraceContextTextMapPropagator()

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


class Span:
    """A recorded span. Thread-safe. After end(), the calls set(), event(), fail() and end() are ignored."""

    def __init__(self, span: OtelSpan, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id)
        self.traceparent = f"00-{self.trace_id}-{format_span_id(context.span_id)}-{int(context.trace_flags):02x}"

    def child(self, name: str, attributes: Attributes | None = None, start_ns: int | None = None) -> Span:
        """Starts a child span for work in this process."""
        return self._child(name, attributes, SpanKind.INTERNAL, start_ns)

    def client(self, name: str, attributes: Attributes | None = None) -> Span:
        """Starts a child span for a call to another service. The spans of that service become children of the new span."""
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
        """Sets the status of the span to an error."""
        if self._span.is_recording():
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(StatusCode.ERROR, message or None)

    def end(self, at_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(at_ns)


class Tracing:
    """Makes spans, which are sent in the background. Thread-safe."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer(SCOPE)

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes | None = None) -> Span | None:
        """Starts a server span for a client's request, in the trace of its `traceparent` header or in a new trace.

        Returns:
            None if the request is not sampled. The `sampled` flag of the header decides; without a header, the sampling ratio.
        """
        return self._started(name, _W3C.extract(headers, Context()), attributes, None)

    def under(
        self, name: str, traceparent: str, attributes: Attributes | None = None, start_ns: int | None = None
    ) -> Span | None:
        """Starts a server span in the trace of another service. Returns None if there is no sampled trace."""
        if not traceparent:
            return None
        context = _W3C.extract({"traceparent": traceparent}, Context())
        if not context:
            return None
        return self._started(name, context, attributes, start_ns)

    def close(self) -> None:
        """Sends the remaining spans. Blocks for at most FLUSH_S."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(FLUSH_S)
        if last.is_alive():
            logger.warning("could not send the last spans within %.0f s", FLUSH_S)

    def _started(self, name: str, context: Context, attributes: Attributes | None, start_ns: int | None) -> Span | None:
        span = self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=start_ns)
        return Span(span, self._tracer) if span.is_recording() else None


def tracing_to(endpoint: str, service: str, ratio: float) -> Tracing:
    """Returns a Tracing that exports to an OTLP collector. The connection is made when the first spans are sent.

    Args:
        endpoint: host:port or URL of the collector.
        ratio: share of the requests without a trace context to sample, 0 to 1.
    """
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # CollectorExporter logs failures once
    exporter = CollectorExporter(OTLPSpanExporter(endpoint, insecure=not endpoint.startswith(TLS), timeout=EXPORT_S), endpoint)
    name = {"service.name": f"rootstock-{service}", "service.instance.id": socket.gethostname()}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create(name), shutdown_on_exit=False
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=BATCH_MS,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
    )
    return Tracing(provider)


class CollectorExporter(SpanExporter):
    """An exporter that logs once when sending begins to fail, and once when it succeeds again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._lost = 0  # spans dropped since the last successful export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                logger.info("can send spans to the collector again", extra=fields(collector=self._endpoint, lost=self._lost))
            self._lost = 0
            return result
        if not self._lost:
            logger.warning("could not send spans to the collector", extra=fields(collector=self._endpoint))
        self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
