"""The fields of a log line besides its message."""

from __future__ import annotations

from typing import Any

FIELDS = "fields"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Returns the `extra` argument of a logging call: logger.info("routed", extra=fields(request_id=rid, worker=w))."""
    return {FIELDS: values}
