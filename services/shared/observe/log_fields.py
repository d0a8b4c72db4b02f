"""The fields of a log line besides its message.

Services pass the trace context of a request as a W3C traceparent. It is empty for a request that is not traced.
"""

from __future__ import annotations

import re
from typing import Any

FIELDS = "fields"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Returns the `extra` argument of a logging call: logger.info("routed", extra=fields(request_id=rid, worker=w))."""
    return {FIELDS: values}


def trace_fields(traceparent: str) -> dict[str, str]:
    """Returns the log field of a trace, {"trace_id": …}, or {} if there is no trace."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return {"trace_id": found[1]} if found else {}
