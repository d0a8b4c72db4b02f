"""Serves the HTTP API for operators on the admin port, with SGLang's paths and names.

| status | meaning |
| --- | --- |
| 200 | the operation succeeded on every worker or gateway |
| 400 | the gateway or a worker refuses the request as invalid |
| 409 | the state of a worker does not allow the operation |
| 502 | a worker or a gateway cannot be reached, or the operation failed there |

The body has one result per worker. The body of an abort has counts instead, and lists the gateways that could not be reached.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from rootstock_llm.services.gateway.admin import bodies as bodies
from rootstock_llm.services.gateway.admin.operations import ROUTES, AdminOperation, AdminOperations
from rootstock_llm.services.gateway.admin.workers import ControlledWorkers, WorkerDirectory
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.generation.abort import Aborter
from rootstock_llm.services.gateway.generation.bodies import BodyBudget, ClientGone
from rootstock_llm.services.gateway.generation.errors import CLIENT_CLOSED, ApiError, Headers, internal
from rootstock_llm.services.gateway.http.body import reserved_body
from rootstock_llm.services.gateway.http.http_server import CannotListen, serve_app
from rootstock_llm.services.gateway.observe.access_log import ERROR_CODE, AccessLog
from rootstock_llm.services.gateway.observe.metrics import OTHER
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.control_token import accepts, require_token_beyond_loopback
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20  # largest body of a request, in bytes
BODY_TIMEOUT_S = 10.0  # seconds within which a request's body must arrive
_PATHS = frozenset(path for _, path in ROUTES)


@contextlib.asynccontextmanager
async def admin_listener(
    config: GatewaySettings,
    token: str,
    directory: WorkerDirectory,
    aborter: Aborter,
    body_budget: BodyBudget,
    dialer: Dialer = PLAINTEXT,
    access: AccessLog | None = None,
) -> AsyncIterator[None]:
    """Serves the admin API until the `async with` block ends. Serves nothing if `admin_port` is 0.

    The end of the block cancels running operations.

    Raises:
        CannotListen: The port cannot be bound, or other hosts could connect to it although no token is configured.
    """
    if not config.admin_port:
        yield
        return
    try:
        require_token_beyond_loopback("admin_host", config.admin_host, token)
    except ValueError as error:
        raise CannotListen(str(error)) from None
    workers = ControlledWorkers(token, dialer)
    operations = AdminOperations(directory, workers, aborter, config.control_timeout_s, config.salt_cache_by_key)
    api = AdminApi(operations, body_budget, token, access or AccessLog("off"))
    async with serve_app(api, config.admin_host, config.admin_port):
        logger.info("admin API", extra=fields(host=config.admin_host, port=config.admin_port))
        yield


class AdminApi:
    """The ASGI application of the admin port. Each request writes a line to the access log."""

    def __init__(self, operations: AdminOperations, body_budget: BodyBudget, token: str, access: AccessLog) -> None:
        self._operations = operations
        self._body_budget = body_budget
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
        """Returns status, headers, body and error code. The status is 499 if the client has disconnected."""
        try:
            status, content = await self._run(scope, receive)
        except ClientGone:
            return CLIENT_CLOSED, [], b"", ""
        except ApiError as error:
            return error.status, [*error.headers(), *_allow(error, scope["path"])], error.json(), error.code or ""
        except Exception:
            logger.exception("unexpected exception in a request of the admin port")
            return 500, internal().headers(), internal().json(), internal().code or ""
        return status, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))], content, ""

    async def _run(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        """Runs the operation of the request. Returns its status and body."""
        self._authorize(dict(scope["headers"]))
        operation = _operation(scope["method"], scope["path"])
        async with reserved_body(scope, receive, self._body_budget, MAX_BODY_BYTES, BODY_TIMEOUT_S) as content:
            body = bodies.parse(operation.body, content.take(), scope["query_string"])
        status, result = await self._operations.run(operation, body)
        logger.info("operation", extra=fields(path=scope["path"], worker=body.worker, status=status))
        return status, orjson.dumps(result)

    def _authorize(self, headers: dict[bytes, bytes]) -> None:
        """Checks the control token, and that no web page sent the request. Raises ApiError.

        Without the second check, a page in an operator's browser could send requests to an admin port on the operator's machine.
        """
        if not accepts(self._token, headers.get(b"authorization", b"")):
            raise ApiError(
                401, "The control token is missing or wrong. Send it as 'Authorization: Bearer TOKEN'.", code="invalid_token"
            )
        if b"origin" in headers:
            raise ApiError(
                403,
                "The admin port refuses requests from web pages. Send the request without the header Origin.",
                code="forbidden",
            )


def _operation(method: str, path: str) -> AdminOperation:
    if (operation := ROUTES.get((method, path))) is not None:
        return operation
    if path in _PATHS:
        raise ApiError(405, "Method Not Allowed.", code="method_not_allowed")
    raise ApiError(404, "Not Found.", code="not_found")


def _allow(error: ApiError, path: str) -> list[tuple[bytes, bytes]]:
    """Returns the header `allow` of an error with status 405. Other errors have no such header."""
    methods = sorted(method for method, route in ROUTES if route == path)
    return [(b"allow", ", ".join(methods).encode())] if error.status == 405 else []


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
    start: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": content})
