"""What a log call says besides its message, for whoever renders the line."""

from __future__ import annotations

from typing import Any

FIELDS = "fields"


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """The `extra` argument of a logging call: logger.info("routed", extra=fields(request_id=rid, worker=w))."""
    return {FIELDS: values}
