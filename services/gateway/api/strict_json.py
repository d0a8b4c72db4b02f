"""JSON of a request's body, and of its parts on their way to other services. Pure; each raises ApiError."""

from __future__ import annotations

from typing import Any

import orjson

from services.gateway.request.errors import bad_request


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """Raises ApiError for anything but an object of strict JSON (no NaN, no lone surrogates, depth below 1024)."""
    wrong = ""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        wrong = f"The body is not valid JSON: {error.msg}, at line {error.lineno}, column {error.colno}."
    if wrong:  # outside the handler: that error holds the whole body
        raise bad_request(None, wrong, "invalid_json")
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object.", "invalid_json")
    return value


def dump_json(value: Any, param: str) -> bytes:
    """param: the client's field, for the error."""
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, RecursionError):
        raise bad_request(param, f"'{param}' is nested too deeply.") from None
