"""JSON of a request's body, and of its parts on their way to other services. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from services.gateway.request.errors import bad_request
from services.shared import limits

WRITTEN_LEVELS = 254  # that orjson writes at most


def load_json(text: bytes | bytearray | str) -> Any:
    """Strict JSON: no NaN, no lone surrogates, depth at most MAX_JSON_DEPTH, so that what is made of it can be written again.
    Raises orjson.JSONDecodeError."""
    value = orjson.loads(text)
    if _opened(text) > limits.MAX_JSON_DEPTH:
        try:
            orjson.dumps(_wrapped(value))
        except orjson.JSONEncodeError:
            raise orjson.JSONDecodeError(f"more than {limits.MAX_JSON_DEPTH} levels", "", 0) from None
    return value


def _opened(text: bytes | bytearray | str) -> int:
    """Objects and arrays that begin, those in texts too."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _wrapped(value: Any) -> Any:
    """It can be written if it has no more levels than it may have."""
    for _ in range(WRITTEN_LEVELS - limits.MAX_JSON_DEPTH):
        value = [value]
    return value


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """Raises ApiError for anything but an object of strict JSON."""
    wrong = ""
    try:
        value = load_json(body)
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


def arguments_text(given: Any) -> str:
    """Returns a call's arguments as the text that a chat message has. Text stays; a missing value is empty."""
    if given is None or isinstance(given, str):
        return given or ""
    return orjson.dumps(given).decode()
