"""Reads JSON of request bodies, and writes parts of them for other services. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from services.gateway.request.errors import bad_request
from services.shared import limits

WRITTEN_LEVELS = 254  # that orjson writes at most


def load_json(text: bytes | bytearray | str) -> Any:
    """Reads strict JSON: no NaN, no lone surrogates, at most MAX_JSON_DEPTH levels, so that it can be written again.

    Raises:
        orjson.JSONDecodeError: The text is not strict JSON.
    """
    value = orjson.loads(text)
    if _opened(text) > limits.MAX_JSON_DEPTH:
        try:
            orjson.dumps(_wrapped(value))
        except orjson.JSONEncodeError:
            raise orjson.JSONDecodeError(f"more than {limits.MAX_JSON_DEPTH} levels", "", 0) from None
    return value


def _opened(text: bytes | bytearray | str) -> int:
    """Returns the number of opening brackets, including those in texts."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _wrapped(value: Any) -> Any:
    """Returns the value within arrays, so that it can be written only if it has at most MAX_JSON_DEPTH levels."""
    for _ in range(WRITTEN_LEVELS - limits.MAX_JSON_DEPTH):
        value = [value]
    return value


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """Returns the object of a body. Raises ApiError if the body is not an object of strict JSON."""
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
    """Returns the JSON text. Raises ApiError that names the client's field `param` if the value is nested too deeply."""
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, RecursionError):
        raise bad_request(param, f"'{param}' is nested too deeply.") from None


def arguments_text(given: Any) -> str:
    """Returns a call's arguments as the text that a chat message has. Text stays; a missing value is empty."""
    if given is None or isinstance(given, str):
        return given or ""
    return orjson.dumps(given).decode()
