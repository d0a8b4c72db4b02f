"""The operators' HTTP API, under SGLang's names: each route is one operation on every worker. Served on a port of its own.

200 if all workers did it. Else the body says which did and which did not: 400 where they say that the request is wrong, 409
where some are in no state for it, 502 where some cannot be reached, or failed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
import orjson
from starlette.types import Receive, Scope, Send

from services.gateway import admin_bodies as bodies
from services.gateway.admin_bodies import AdminBody
from services.gateway.admin_workers import ControlledWorkers, WorkerAnswer
from services.gateway.body import ClientGone, read_body
from services.gateway.errors import ApiError, internal
from services.shared.control_token import accepts
from services.shared.log import fields

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Operation:
    """rpc: the control service's method. body: what the HTTP request may hold."""

    rpc: str
    body: type[AdminBody]


_STATE = Operation("GetInternalState", bodies.GetInternalState)
ROUTES: Mapping[tuple[str, str], Operation] = {
    ("POST", "/flush_cache"): Operation("FlushCache", bodies.FlushCache),
    ("GET", "/get_server_info"): _STATE,
    ("GET", "/server_info"): _STATE,
    ("GET", "/set_internal_state"): _STATE,
    ("POST", "/set_internal_state"): Operation("SetInternalState", bodies.SetInternalState),
    ("POST", "/slow_down"): Operation("SlowDown", bodies.SlowDown),
    ("POST", "/pause_generation"): Operation("Pause", bodies.Pause),
    ("POST", "/continue_generation"): Operation("Continue", bodies.Continue),
    ("POST", "/start_profile"): Operation("StartProfile", bodies.StartProfile),
    ("POST", "/stop_profile"): Operation("StopProfile", bodies.StopProfile),
    ("POST", "/freeze_gc"): Operation("FreezeGc", bodies.FreezeGc),
    ("POST", "/release_memory_occupation"): Operation("ReleaseMemory", bodies.ReleaseMemory),
    ("POST", "/resume_memory_occupation"): Operation("ResumeMemory", bodies.ResumeMemory),
    ("POST", "/configure_logging"): Operation("SetLogLevel", bodies.SetLogLevel),
    ("POST", "/trace_request"): Operation("TraceRequest", bodies.TraceRequest),
}
_PATHS = frozenset(path for _, path in ROUTES)


class AdminApi:
    """An ASGI application. timeout_s: of an operation on one worker, where the request names none."""

    def __init__(self, workers: ControlledWorkers, token: str, timeout_s: float) -> None:
        self._workers = workers
        self._token = token
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, content = await self._answer(scope, receive)
        except ClientGone:
            return
        except ApiError as error:
            await _send(send, error.status, error.headers(), error.json())
            return
        except Exception:
            logger.exception("fault while answering an operator")
            await _send(send, 500, internal().headers(), internal().json())
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await _send(send, status, headers, content)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        self._admit(dict(scope["headers"]))
        operation = _operation(scope["method"], scope["path"])
        content = await read_body(scope, receive, MAX_BODY_BYTES, BODY_TIMEOUT_S)
        body = bodies.parse(operation.body, content)
        answers = await self._workers.ask(operation.rpc, body.request(), body.timeout_s or self._timeout_s)
        status = _status(answers)
        logger.info("operation", extra=fields(operation=operation.rpc, status=status))
        done = {"success": status == 200, "workers": [answer.body() for answer in answers]}
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


def _status(answers: Sequence[WorkerAnswer]) -> int:
    """The worst of the workers' answers, as one HTTP status."""
    codes = {answer.code for answer in answers} - {None}
    if not codes:
        return 200
    if codes - {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}:
        return 502
    return 409 if grpc.StatusCode.FAILED_PRECONDITION in codes else 400


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
