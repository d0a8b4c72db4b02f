"""Describes the error responses that all operations share, and the headers of every status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rootstock_llm.services.gateway.api.document.operation import JSON, ErrorFamily
from rootstock_llm.services.gateway.generation.errors import CODES

HEADERS: dict[str, dict[str, Any]] = {
    "x-request-id": {
        "description": "The id of the request, or a random id if the request has no valid one.",
        "schema": {"type": "string", "minLength": 1},
    },
    "request-id": {"description": "Same as x-request-id.", "schema": {"type": "string", "minLength": 1}},
    "x-rootstock-omitted-tools": {
        "description": "Hosted tools that were left out of the request, as type or type:name, separated by commas.",
        "schema": {"type": "string", "minLength": 1},
    },
    "retry-after": {"description": "Seconds after which the client may retry.", "schema": {"type": "integer", "minimum": 1}},
    "www-authenticate": {"description": "Scheme of the API key.", "schema": {"const": "Bearer"}},
    "allow": {"description": "Methods of the path.", "schema": {"type": "string", "pattern": "^[A-Z]+(, [A-Z]+)*$"}},
    "cache-control": {"description": "Caches revalidate streams and pages.", "schema": {"const": "no-cache"}},
    "x-rootstock-stored": {
        "description": "The response is not stored, although the request asks for it. It cannot be fetched or followed.",
        "schema": {"const": "false"},
    },
    "x-accel-buffering": {"description": "Proxies must not buffer a stream.", "schema": {"const": "no"}},
    "content-security-policy": {
        "description": "Allows the page's script and style by their hashes, and requests to this gateway.",
        "schema": {"type": "string", "pattern": "^default-src 'none'; script-src 'sha256-"},
    },
    "x-content-type-options": {"description": "Browsers use the declared media type of a page.", "schema": {"const": "nosniff"}},
    "referrer-policy": {"description": "Links of a page send no referrer.", "schema": {"const": "no-referrer"}},
}
_AMOUNT = {"type": "integer", "minimum": 0}
_RATE_LIMITS: dict[str, dict[str, Any]] = {
    f"x-ratelimit-{kind}-{unit}": {"description": description.format(unit), "schema": schema}
    for kind, description, schema in (
        ("limit", "Maximum number of {} of the API key per minute.", _AMOUNT),
        ("remaining", "Number of {} that the limit allows at present.", _AMOUNT),
        (
            "reset",
            "Time until the API key may use its full limit of {}.",
            {"type": "string", "pattern": "^[0-9]+(ms|s|m[0-9]+s)$"},
        ),
    )
    for unit in ("requests", "tokens")
}


def _codes_of(status: int) -> str:
    codes = sorted(code for code, row in CODES.items() if status in row.statuses)
    return f"Codes: {', '.join(codes)}." if codes else ""


_STATUSES = {
    400: ("BadRequest", "The request is invalid, or was aborted before the first output."),
    401: ("Unauthorized", "The request has no valid API key."),
    403: ("Forbidden", "The operation is for operators, or the API key may not use the model."),
    404: ("NotFound", "The model, session, path or stored object does not exist."),
    405: ("MethodNotAllowed", "The path does not have this method."),
    408: ("RequestTimeout", "The request's head or body did not arrive in time."),
    409: ("Conflict", "Other requests change the object at the same time, or its state does not allow the operation."),
    413: ("ContentTooLarge", "The body, or a text in it, is too large."),
    429: ("TooManyRequests", "A rate limit or the storage limit of the API key is reached."),
    431: ("HeadTooLarge", "The request's head is too large."),
    500: ("InternalServerError", "An internal error."),
    503: ("ServiceUnavailable", "The server is overloaded, or a service that the request needs is not connected."),
    504: ("DeadlineExceeded", "The request took longer than the server allows."),
    529: ("Overloaded", "The server is overloaded, or a service that the request needs is not connected."),
}
ERRORS = {status: (name, f"{cause} {_codes_of(status)}".strip()) for status, (name, cause) in _STATUSES.items()}
_OF_FAMILIES = frozenset((529,))  # statuses that only APIs with an ErrorFamily have
# The HTTP connection may send these statuses before the request has an id: for an invalid, slow or too large head, and for too
# many connections.
_WITHOUT_ID = frozenset((400, 408, 431, 503))
_ALWAYS = {401: ("www-authenticate",), 405: ("allow",), 503: ("retry-after",), 529: ("retry-after",)}


def headers(status: int, keys: bool, always: Sequence[str] = (), sometimes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the header objects of a response.

    Args:
        keys: Whether the gateway checks API keys. If so, each response has headers with the rate limits of the API key.
        always: Names in HEADERS of headers that each of the responses has, in addition to those that the status requires.
        sometimes: Names in HEADERS of headers that only some of the responses have.
    """
    found = {"x-request-id": {**HEADERS["x-request-id"], "required": status not in _WITHOUT_ID}}
    for name in (*_ALWAYS.get(status, ()), *always):
        found[name] = {**HEADERS[name], "required": True}
    for name in (*sometimes, *(("retry-after",) if status == 429 else ())):
        found[name] = HEADERS[name]
    return {**found, **_RATE_LIMITS} if keys else found


def shared(keys: bool, schema: dict[str, Any], family: ErrorFamily | None = None, plain: Any = None) -> dict[str, Any]:
    """Returns the error responses of one form by name. Operations refer to these names.

    Args:
        keys: Whether the gateway checks API keys.
        schema: Schema of an error body.
        family: Form of the errors; None for OpenAI's.
        plain: Schema of OpenAI's error body, which the HTTP connection sends if a request fails before its path is known. Used
            only with `family`.
    """
    either = schema if family is None else {"anyOf": [schema, plain]}
    return {
        _name(status, family): {
            "description": description,
            "headers": headers(status, keys, sometimes=family.headers if family is not None else ()),
            "content": {JSON: {"schema": either if status in _WITHOUT_ID else schema}},
        }
        for status, (_, description) in ERRORS.items()
        if (keys or status != 401) and (status not in _OF_FAMILIES or (family is not None and status in family.statuses))
    }


def reference(status: int, family: ErrorFamily | None = None) -> dict[str, str]:
    """Returns a reference to the error response of a status. `family` is None for OpenAI's form."""
    return {"$ref": f"#/components/responses/{_name(status, family)}"}


def _name(status: int, family: ErrorFamily | None) -> str:
    return (family.name if family is not None else "") + ERRORS[status][0]
