"""The outermost ASGI layer of the gateway's HTTP port.

It gives each request an id, checks the API key, adds headers to responses, answers unexpected exceptions with 500, and counts and
logs the responses by route.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rootstock_llm.services.gateway.generation.errors import OPENAI, AnswerForm, ApiError, Headers, internal
from rootstock_llm.services.gateway.generation.origin import NOBODY, OMITTED_TOOLS, Caller
from rootstock_llm.services.gateway.keys.key_ring import KeyRing
from rootstock_llm.services.gateway.observe.access_log import ERROR_CODE, AccessLog
from rootstock_llm.services.gateway.observe.metrics import OTHER, GatewayMetrics
from rootstock_llm.services.shared.limits import MAX_REQUEST_ID_CHARS
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

_CHOICE_SUFFIX_CHARS = 8  # a message to a worker has the request id with the choice's index as a suffix of at most this length
_VALID_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,%d}" % (MAX_REQUEST_ID_CHARS - _CHOICE_SUFFIX_CHARS))
_OPEN_PATHS = frozenset(  # paths without an API key
    ("/health", "/health_generate", "/ping", "/readiness", "/ready", "/metrics", "/docs", "/openapi.json")
)
MOST_NAMED_TOOLS = 24  # tools that x-rootstock-omitted-tools names; keeps the header below the 4 KiB that proxies accept
_OVERLOADED = frozenset((503, 529))  # statuses whose Retry-After follows the length of the queue
_MODEL_PATH = "/v1/models/"


class FrontDoor:
    """The ASGI application around all routes. Each process has one FrontDoor.

    FrontDoor and the routes exchange data in scope["state"]:

    | entry | direction | meaning |
    | --- | --- | --- |
    | `request_id` | to the routes | the client's id if it is valid, else a random one |
    | `caller`, `key` | to the routes | the caller, and the name of its API key |
    | `form` | to the routes | the form of errors of the path's API |
    | `model` | from the routes | the model's name, for metrics and the access log |
    | `code` | from the routes | replaces the HTTP status in metrics and the access log |
    | `OMITTED_TOOLS` | from the routes | names of hosted tools that were left out of the request |
    | `ERROR_CODE`, `CUT`, `GENERATION`, `ABORTED` | from the routes | values for the access log |
    """

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
        """Wraps an application.

        Args:
            routes: Paths of the OpenAPI document, by which responses are counted.
            retry_after_s: Returns the smallest Retry-After of a 503 or 529 in seconds, from the current length of the queue.
            forms: Form of errors by path, if it differs from OpenAI's.
            pages: Paths of HTML pages. They need no API key, because a browser sends none.
        """
        self._app = app
        self._routes = frozenset(routes)
        self._templates = {route: _path_pattern(route) for route in routes if "{" in route}
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
                omitted = _omitted_tools_header(state[OMITTED_TOOLS]) if status == 200 else ()
                message["headers"] = [*message.get("headers", ()), *ids, *limits, *omitted]
                if status in _OVERLOADED:
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
            await _send_response(form.answer(error, request_id), send_with_id)
        except Exception:
            logger.exception("unexpected exception while serving a request", extra=fields(request_id=request_id))
            state[ERROR_CODE] = internal().code
            if not status:
                await _send_response(form.answer(internal(), request_id), send_with_id)
        finally:
            route, code = self._route(scope["path"]), str(state.get("code", status))
            self._metrics.requests.labels(route, state.get("model", OTHER), code).inc()
            self._access.ended("http", scope["method"], route, state, status, num_bytes, time.monotonic() - began)

    def _caller(self, path: str, headers: dict[bytes, bytes]) -> Caller:
        """Returns the caller with the API key of the request. Raises ApiError if the API key is missing or unknown."""
        return NOBODY if path in self._open_paths else self._keys.caller(headers)

    def _route(self, path: str) -> str:
        """Returns the route of a path, as in metrics and the access log; OTHER if no route has the path."""
        if path in self._routes:
            return path
        if path.startswith(_MODEL_PATH):
            return f"{_MODEL_PATH}{{id}}"
        return next((route for route, pattern in self._templates.items() if pattern.fullmatch(path)), OTHER)


def _path_pattern(route: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, re.split(r"\{[a-z_]+\}", route))))


def _routable(scope: Scope) -> Scope:
    """Returns the scope with a final newline of the path percent-encoded.

    Starlette's pattern of a route ends in `$`. In Python, `$` also matches before a final newline, so without the encoding
    "/health\\n" would reach the route of "/health".
    """
    path = scope["path"]
    return {**scope, "path": path[:-1] + "%0A"} if path.endswith("\n") else scope


def _request_id(given: bytes) -> str:
    return given.decode() if _VALID_ID.fullmatch(given) else uuid.uuid4().hex


def _omitted_tools_header(tools: Sequence[str]) -> Headers:
    """Returns the header that names the hosted tools that were left out. A long list is truncated."""
    if not tools:
        return []
    more = [f"and {len(tools) - MOST_NAMED_TOOLS} more"] if len(tools) > MOST_NAMED_TOOLS else []
    return [(b"x-rootstock-omitted-tools", ", ".join([*tools[:MOST_NAMED_TOOLS], *more]).encode())]


def _with_retry_after(headers: Headers, seconds: int) -> Headers:
    own = [int(value) for name, value in headers if name == b"retry-after"]
    others = [header for header in headers if header[0] != b"retry-after"]
    return [*others, (b"retry-after", b"%d" % max(seconds, *own, 1))]


async def _send_response(answer: tuple[int, Headers, bytes], send: Send) -> None:
    status, headers, body = answer
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
