"""Anthropic's form of errors, and the ping event that keeps a stream open while no output is generated."""

from __future__ import annotations

from typing import Any

from rootstock_llm.services.gateway.generation.errors import AnswerForm, ApiError

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def _body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _status(status: int) -> int:
    return OVERLOADED if status == 503 else status


ANTHROPIC = AnswerForm(_body, _status, b"error", PING, b"request-id")
