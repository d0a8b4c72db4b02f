"""The operators' HTTP API, under SGLang's names, on a port of its own: who may use it, and what a request means.

200 if everybody who was meant did it. Else the body says who did and who did not: 400 where workers say that the request is
wrong, 409 where some are in no state for it, 502 where some cannot be reached, or failed.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from services.gateway.admin import bodies as bodies
from services.gateway.admin.operations import ROUTES, Operation, Operations
from services.gateway.http.body import held_body
from services.gateway.observe.access_log import ERROR_CODE, AccessLog
from services.gateway.observe.key_labels import OTHER
from services.gateway.request.body_budget import BodyBudget, ClientGone
from services.gateway.request.errors import CLIENT_CLOSED, ApiError, Headers, internal
from services.shared.observe.log_fields import fields
from services.shared.rpc.control_token import accepts

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0
_PATHS = frozenset(path for _, path in ROUTES)


class AdminApi:
    """An ASGI application. Each request leaves a line in the access log."""

    def __init__(self, operations: Operations, bodies: BodyBudget, token: str, access: AccessLog) -> None:
        self._operations = operations
        self._bodies = bodies
        self._token = token
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.monotonic()
        status, headers, content, code = await self._response(scope, receive)
        try:
            if status != CLIENT_CLOSED:
                await _send(send, status, headers, content)
        finally:
            route = scope["path"] if scope["path"] in _PATHS else OTHER
            state = {"request_id": "", ERROR_CODE: code}
            self._access.ended("admin", scope["method"], route, state, status, len(content), time.monotonic() - began)

    async def _response(self, scope: Scope, receive: Receive) -> tuple[int, Headers, bytes, str]:
        """Returns status, headers, body and error code. The status is 499 if the client left."""
        try:
            status, content = await self._answer(scope, receive)
        except ClientGone:
            return CLIENT_CLOSED, [], b"", ""
        except ApiError as error:
            return error.status, [*error.headers(), *_allow(error, scope["path"])], error.json(), error.code or ""
        except Exception:
            logger.exception("fault while answering an operator")
            return 500, internal().headers(), internal().json(), internal().code or ""
        return status, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))], content, ""

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        self._admit(dict(scope["headers"]))
        operation = _operation(scope["method"], scope["path"])
        async with held_body(scope, receive, self._bodies, MAX_BODY_BYTES, BODY_TIMEOUT_S) as content:
            body = bodies.parse(operation.body, content.take(), scope["query_string"])
        status, done = await self._operations.run(operation, body)
        logger.info("operation", extra=fields(path=scope["path"], worker=body.worker, status=status))
        return status, orjson.dumps(done)

    def _admit(self, headers: dict[bytes, bytes]) -> None:
        if not accepts(self._token, headers.get(b"authorization", b"")):
            raise ApiError(401, "A valid token is required, as 'Authorization: Bearer TOKEN'.", code="invalid_token")
        if b"origin" in headers:  # a page that an operator has open somewhere must not operate this machine's workers
            raise ApiError(403, "Requests from web pages are refused.", code="forbidden")


def _operation(method: str, path: str) -> Operation:
    if (found := ROUTES.get((method, path))) is not None:
        return found
    if path in _PATHS:
        raise ApiError(405, "Method Not Allowed.", code="method_not_allowed")
    raise ApiError(404, "Not Found.", code="not_found")


def _allow(error: ApiError, path: str) -> list[tuple[bytes, bytes]]:
    methods = sorted(method for method, other in ROUTES if other == path)
    return [(b"allow", ", ".join(methods).encode())] if error.status == 405 else []


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
    start: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": content})
