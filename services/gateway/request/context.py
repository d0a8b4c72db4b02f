"""The facts about a generation request that its caller has before the body is read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.request.caller import NOBODY, Caller


@dataclass(frozen=True, slots=True)
class CallContext:
    """Identifies one call of a generating operation: an HTTP request, a batch line, a background response or a health probe."""

    request_id: str
    route: str  # path of the operation, as in metrics and spans
    method: str = "POST"
    caller: Caller = NOBODY
    routing_key: str = ""  # from a header; it goes before the body's own
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C traceparent and tracestate of the client
    is_counted: bool = True  # False for a health probe: no limit, no trace, and not in the metrics of clients
