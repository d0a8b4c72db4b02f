"""The outermost ASGI layer: request ids, API keys, the last resort for faults, and the count and log of responses by route."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.keys.key_ring import KeyRing
from services.gateway.observe.access_log import ERROR_CODE, AccessLog
from services.gateway.observe.key_labels import OTHER
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.caller import NOBODY, Caller
from services.gateway.request.errors import OPENAI, AnswerForm, ApiError, Headers, internal
from services.gateway.request.origin import OMITTED_TOOLS
from services.shared.limits import MAX_REQUEST_ID_CHARS
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

_CHOICE_SUFFIX_CHARS = 8  # what a choice's number adds to the id on its way to the worker, at most
_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,%d}" % (MAX_REQUEST_ID_CHARS - _CHOICE_SUFFIX_CHARS))
_OPEN_PATHS = frozenset(("/health", "/health_generate", "/ping", "/readiness", "/ready", "/metrics", "/docs", "/openapi.json"))
MOST_NAMED_TOOLS = 24  # so that a header stays below the 4 KiB that proxies take
_NO_ROOM = frozenset((503, 529))
_MODEL_PATH = "/v1/models/"


class FrontDoor:
    """scope["state"] carries `request_id`, `caller`, the name of its `key` and the API's `form` inwards,
    and `model`, `code` (instead of the HTTP status), the omitted tools and the access log's keys outwards."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[str],
        keys: KeyRing,
        metrics: GatewayMetrics,
        retry_after_s: Callable[[], int],
        forms: Mapping[str, AnswerForm],
        access: AccessLog,
        pages: Collection[str] = (),
    ) -> None:
        """retry_after_s: of a 503, by what waits; the answer's own where that is longer. forms: by path, where they are not
        OpenAI's. pages: paths that a browser opens, which shows no key."""
        self._app = app
        self._routes = frozenset(routes)
        self._templates = {route: _matching(route) for route in routes if "{" in route}
        self._keys = keys
        self._metrics = metrics
        self._retry_after_s = retry_after_s
        self._forms = forms
        self._access = access
        self._open_paths = _OPEN_PATHS.union(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[OMITTED_TOOLS] = []
        state["form"] = form = self._forms.get(scope["path"], OPENAI)
        status = num_bytes = 0
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                limits = self._keys.headers(state.get("key", ""))
                ids = [(name, request_id.encode()) for name in (b"x-request-id", form.id_header) if name]
                omitted = _omitted(state[OMITTED_TOOLS]) if status == 200 else ()
                message["headers"] = [*message.get("headers", ()), *ids, *limits, *omitted]
                if status in _NO_ROOM:
                    message["headers"] = _with_retry_after(message["headers"], self._retry_after_s())
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            state["caller"] = caller = self._caller(scope["path"], headers)
            state["key"] = caller.key
            await self._app(_routable(scope), receive, send_with_id)
        except ApiError as error:
            state[ERROR_CODE] = error.code
            await _answer(form.answer(error, request_id), send_with_id)
        except Exception:
            logger.exception("fault while answering", extra=fields(request_id=request_id))
            state[ERROR_CODE] = internal().code
            if not status:
                await _answer(form.answer(internal(), request_id), send_with_id)
        finally:
            route, code = self._route(scope["path"]), str(state.get("code", status))
            self._metrics.requests.labels(route, state.get("model", OTHER), code).inc()
            self._access.ended("http", scope["method"], route, state, status, num_bytes, time.monotonic() - began)

    def _caller(self, path: str, headers: dict[bytes, bytes]) -> Caller:
        """Raises ApiError."""
        return NOBODY if path in self._open_paths else self._keys.caller(headers)

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        if path.startswith(_MODEL_PATH):
            return f"{_MODEL_PATH}{{id}}"
        return next((route for route, pattern in self._templates.items() if pattern.fullmatch(path)), OTHER)


def _matching(route: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, re.split(r"\{[a-z_]+\}", route))))


def _routable(scope: Scope) -> Scope:
    """Returns the scope with a final newline of the path percent-encoded.

    A route's pattern ends in `$`, which also matches before a final newline.
    """
    path = scope["path"]
    return {**scope, "path": path[:-1] + "%0A"} if path.endswith("\n") else scope


def _request_id(given: bytes) -> str:
    return given.decode() if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _omitted(tools: Sequence[str]) -> Headers:
    """Returns the header that names hosted tools which the request is served without. A long list is cut."""
    if not tools:
        return []
    more = [f"and {len(tools) - MOST_NAMED_TOOLS} more"] if len(tools) > MOST_NAMED_TOOLS else []
    return [(b"x-rootstock-omitted-tools", ", ".join([*tools[:MOST_NAMED_TOOLS], *more]).encode())]


def _with_retry_after(headers: Headers, seconds: int) -> Headers:
    own = [int(value) for name, value in headers if name == b"retry-after"]
    others = [header for header in headers if header[0] != b"retry-after"]
    return [*others, (b"retry-after", b"%d" % max(seconds, *own, 1))]


async def _answer(answer: tuple[int, Headers, bytes], send: Send) -> None:
    status, headers, body = answer
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
