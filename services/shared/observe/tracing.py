"""Starts tracing and reads trace ids without loading OpenTelemetry unless tracing is on.

Services pass the trace context of a request as a W3C traceparent. It is empty for a request that is not traced.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.shared.observe.spans import Tracing
    from services.shared.settings import ServiceSettings

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def start_tracing(settings: ServiceSettings, service: str) -> Tracing | None:
    """Returns a Tracing, which the caller must close, or None if the settings name no collector."""
    if not settings.otlp_endpoint:
        return None
    from services.shared.observe.spans import tracing_to

    return tracing_to(settings.otlp_endpoint, service, settings.trace_sample_ratio)


def trace_fields(traceparent: str) -> dict[str, str]:
    """Returns the log field of a trace, {"trace_id": …}, or {} if there is no trace."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return {"trace_id": found[1]} if found else {}
