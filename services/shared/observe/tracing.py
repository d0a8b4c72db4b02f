"""What every service knows of tracing without loading OpenTelemetry: whether it is on, and which trace a request belongs to.

Contexts travel between services as a W3C traceparent, "" for a request that is not traced.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.shared.observe.spans import Tracing
    from services.shared.settings import ServiceSettings

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def start_tracing(settings: ServiceSettings, service: str) -> Tracing | None:
    """None where settings name no collector; OpenTelemetry is imported only where they do. Whoever starts it closes it."""
    if not settings.otlp_endpoint:
        return None
    from services.shared.observe.span_export import tracing_to

    return tracing_to(settings.otlp_endpoint, service, settings.trace_sample_ratio)


def trace_fields(traceparent: str) -> dict[str, str]:
    """What a log line says of the trace: {"trace_id": ...}, or nothing."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return {"trace_id": found[1]} if found else {}
