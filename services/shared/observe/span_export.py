"""How spans leave a process: over OTLP/gRPC, in batches, from a thread of their own. What cannot be sent is dropped."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from services.shared.observe.log_fields import fields
from services.shared.observe.spans import Tracing

logger = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 16384  # that wait to be sent; the oldest are dropped beyond
MAX_BATCH_SPANS = 512
BATCH_MS = 500.0  # after which fewer are sent too
EXPORT_S = 5.0  # that one batch may take, retries included; then it is dropped
TLS = "https://"


def tracing_to(endpoint: str, service: str, ratio: float) -> Tracing:
    """endpoint: host:port or URL of a collector. ratio: of requests whose client has not decided. Connects when it must."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # CollectorExporter says it once
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
    """One log line when spans begin to be lost, and one when they go out again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._lost = 0  # since the last batch that went out

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                logger.info("spans are sent again", extra=fields(collector=self._endpoint, lost=self._lost))
            self._lost = 0
            return result
        if not self._lost:
            logger.warning("the collector takes no spans, serving on without it", extra=fields(collector=self._endpoint))
        self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
