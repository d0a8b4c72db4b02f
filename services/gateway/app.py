"""The HTTP routes and their documentation. How one is answered is in services/gateway/http/answer.py; here is only
what FastAPI is asked to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from services import __version__
from services.gateway.api.document import server
from services.gateway.api.document.document import document
from services.gateway.api.document.operation import Operation as DocumentedOperation
from services.gateway.api.openai import operations as openai
from services.gateway.api.openai.embeddings import EmbeddingRenderer
from services.gateway.api.openai.preparation import Preparer
from services.gateway.api.openai.render import ChatRenderer, CompletionRenderer
from services.gateway.http.answer import HttpPort, endpoint_of
from services.gateway.http.direct_routes import DirectRoutes
from services.gateway.http.front_door import FrontDoor
from services.gateway.http.readiness import Readiness
from services.gateway.keys.key_ring import KeyRing
from services.gateway.observe.access_log import ERROR_CODE, AccessLog
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.playground import static_page
from services.gateway.request.caller import Caller
from services.gateway.request.errors import AnswerForm, ApiError, internal, model_not_allowed, unknown_model
from services.gateway.request.generation import ModelInfo
from services.gateway.service.sink import MakeOperation, Operation

_INFO = {"title": "Rootstock", "version": __version__, "description": "An OpenAI-compatible API, and SGLang's own."}
_RATE_LIMITS = [
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens", "concurrency")
]
# Headers that a page of another origin may read.
_EXPOSED = ("x-request-id", "retry-after", "x-rootstock-omitted-tools", "x-rootstock-stored", *_RATE_LIMITS)


class ApiRoutes(Protocol):
    """An API beside OpenAI's chat, completions and embeddings. forms: how it writes errors, by path, where that is not as
    OpenAI's."""

    forms: Mapping[str, AnswerForm]

    @property
    def operations(self) -> Sequence[DocumentedOperation]: ...

    def add_routes(self, app: FastAPI) -> Mapping[str, MakeOperation]:
        """Adds the routes and returns the generating operations by path."""


def build(
    port: HttpPort,
    keys: KeyRing,
    access: AccessLog,
    preparer: Preparer,
    served: Callable[[], Sequence[ModelInfo]],
    apis: Sequence[ApiRoutes],
    readiness: Readiness,
    metrics: GatewayMetrics,
    retry_after_s: Callable[[], int],
    made: dict[str, MakeOperation],
) -> ASGIApp:
    """Returns the gateway's ASGI application.

    Args:
        served: Returns the served models, and those whose workers are still to connect.
        retry_after_s: Returns the seconds after which a client of a 503 retries, by the length of the queue.
        made: Filled with the generating operations, by path.
    """
    settings = port.settings
    on_http = metrics if settings.metrics_on_http else None
    further = [operation for api in apis for operation in api.operations]
    operations = (*openai.OPERATIONS, *further, *server.operations(on_http is not None, settings.playground))
    app = FastAPI(
        title=_INFO["title"],
        redoc_url=None,
        docs_url=None,
        openapi_url=server.DOCUMENT if settings.docs_enabled else None,
        redirect_slashes=False,
    )
    _add_errors(app)
    forms = {path: form for api in apis for path, form in api.forms.items()}
    made.update(_add_generation(app, port, preparer))
    for api in apis:
        made.update(api.add_routes(app))
    _add_models(app, served)
    _add_operations(app, readiness, on_http)
    pages = {server.DOCS: static_page.REFERENCE} if settings.docs_enabled else {}
    pages |= {server.PLAYGROUND: static_page.PLAYGROUND} if settings.playground else {}
    for path, name in pages.items():
        _add_page(app, path, static_page.static_page(name))
    has_keys, origins = bool(settings.api_keys_file), settings.cors_allow_origins
    app.openapi = cache(lambda: document(_INFO, operations, has_keys, bool(origins)))  # type: ignore[method-assign]
    routes = [operation.path for operation in operations]
    direct = DirectRoutes(app, {path: endpoint_of(port, make) for path, make in made.items()})
    door = FrontDoor(direct, routes, keys, metrics, retry_after_s, forms, access, pages)
    return _with_cors(door, origins)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Outermost: a browser asks beforehand without a key."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("DELETE", "GET", "HEAD", "OPTIONS", "POST", "PUT"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _error_response(request: Request, error: ApiError) -> Response:
    state = request.scope["state"]
    state[ERROR_CODE] = error.code
    status, headers, body = state["form"].answer(error, state["request_id"])
    response = Response(body, status)
    response.raw_headers = headers
    return response


def _add_errors(app: FastAPI) -> None:
    async def on_http_error(request: Request, error: Exception) -> Response:
        """No such route (404) or no such method on it (405)."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _other_method(app, request)
        return _error_response(request, ApiError(error.status_code, f"{error.detail}.", code="not_found"))

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(request, error)

    async def on_fault(request: Request, error: Exception) -> Response:
        """It is raised again behind this, for who logs it."""
        return _error_response(request, internal())

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_fault)
    app.add_exception_handler(ApiError, on_api_error)


def _other_method(app: FastAPI, request: Request) -> Response:
    """To OPTIONS: what may be asked of the path. To others: that they may not be."""
    met = [route for route in app.router.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    exact = [route for route in met if route.path == request.scope["path"]]
    allowed = {"OPTIONS"}.union(*(route.methods or () for route in exact or met))
    if "GET" in allowed:
        allowed.add("HEAD")
    response = Response(status_code=204)
    if request.method != "OPTIONS":
        response = _error_response(request, ApiError(405, "Method Not Allowed.", code="method_not_allowed"))
    response.headers["allow"] = ", ".join(sorted(allowed))
    return response


def _add_generation(app: FastAPI, port: HttpPort, preparer: Preparer) -> Mapping[str, MakeOperation]:
    made: dict[str, MakeOperation] = {
        openai.CHAT: lambda: Operation(preparer.chat, ChatRenderer),
        openai.COMPLETIONS: lambda: Operation(preparer.completion, CompletionRenderer),
        openai.EMBEDDINGS: lambda: Operation(preparer.embedding, EmbeddingRenderer),
    }
    for path, make in made.items():
        app.post(path)(endpoint_of(port, make))
    return made


def _add_models(app: FastAPI, served: Callable[[], Sequence[ModelInfo]]) -> None:
    started = int(time.time())

    def cards(request: Request) -> list[dict[str, Any]]:
        """Of the models that the caller may use."""
        caller: Caller = request.scope["state"]["caller"]
        return [
            {
                "id": model.name,
                "object": "model",
                "created": started,
                "owned_by": "rootstock",
                "max_model_len": model.context_len or None,
                "sampling_defaults": model.defaults.as_dict(),
                "type": "model",
                "display_name": model.name,
                "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            }
            for model in served()
            if caller.may_use(model.name)
        ]

    @app.get(openai.MODELS)
    async def models(request: Request) -> Response:
        data = cards(request)
        names = [card["id"] for card in data] or [None]
        return _json({"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})

    @app.get(f"{openai.MODELS}/{{model_id:path}}")
    async def model(request: Request, model_id: str) -> Response:
        if not request.scope["state"]["caller"].may_use(model_id):
            raise model_not_allowed()
        found = [card for card in cards(request) if card["id"] == model_id]
        if not found:
            raise unknown_model()
        return _json(found[0])


def _add_page(app: FastAPI, path: str, page: Response) -> None:
    @app.get(path)
    async def sent() -> Response:
        return page


def _add_operations(app: FastAPI, readiness: Readiness, metrics: GatewayMetrics | None) -> None:
    @app.get(server.HEALTH)
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get(server.READINESS)
    async def ready() -> Response:
        missing = readiness.missing()
        return _json({"ready": not missing, "missing": missing}, 503 if missing else 200)

    @app.get(server.READY)
    async def takes_requests() -> Response:
        missing = readiness.refused_for()
        return _json({"ready": not missing, "missing": missing}, 503 if missing else 200)

    if metrics is None:
        return

    @app.get(server.METRICS)
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
