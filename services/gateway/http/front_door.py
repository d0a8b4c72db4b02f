"""The outermost ASGI layer: request ids, API keys, the last resort for faults, and the count of answers by route and code."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.config.settings import key_name
from services.gateway.observe.metrics import OTHER, GatewayMetrics
from services.gateway.request.errors import ApiError, internal
from services.shared.limits import MAX_REQUEST_ID_CHARS
from services.shared.observe.log import fields

logger = logging.getLogger(__name__)

_CHOICE_SUFFIX_CHARS = 8  # what a choice's number adds to the id on its way to the worker, at most
_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,%d}" % (MAX_REQUEST_ID_CHARS - _CHOICE_SUFFIX_CHARS))
_OPEN_PATHS = frozenset(("/health", "/health_generate", "/readiness", "/metrics", "/docs", "/openapi.json"))
_MODEL_PATH = "/v1/models/"


class FrontDoor:
    """scope["state"] carries `request_id` and `key` inwards, and `model` and `code` (instead of the HTTP status) outwards."""

    def __init__(self, app: ASGIApp, routes: Sequence[str], api_keys: Sequence[str], metrics: GatewayMetrics) -> None:
        self._app = app
        self._routes = frozenset(routes)
        self._keys = [key.encode() for key in api_keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            state["key"] = self._authenticate(scope["path"], headers)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await _answer(error, send_with_id)
        except Exception:
            logger.exception("fault while answering", extra=fields(request_id=request_id))
            if not status:
                await _answer(internal(), send_with_id)
        finally:
            code = str(state.get("code", status))
            self._metrics.requests.labels(self._route(scope["path"]), state.get("model", OTHER), code).inc()

    def _authenticate(self, path: str, headers: dict[bytes, bytes]) -> str:
        """The name of the caller's key, "" where none is asked for. Raises ApiError."""
        if not self._keys or path in _OPEN_PATHS:
            return ""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared, so that the time tells nothing of which one was near.
        matches = [hmac.compare_digest(key, given.strip()) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, "A valid API key is required, as 'Authorization: Bearer KEY'.", code="invalid_api_key")
        return key_name(matches.index(True))

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return f"{_MODEL_PATH}{{id}}" if path.startswith(_MODEL_PATH) else OTHER


def _request_id(given: bytes) -> str:
    return given.decode() if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


async def _answer(error: ApiError, send: Send) -> None:
    await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
    await send({"type": "http.response.body", "body": error.json()})
