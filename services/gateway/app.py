"""Builds the gateway's ASGI application: routes, error responses, the OpenAPI document, pages, API keys and CORS."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from rootstock_llm.services import __version__
from rootstock_llm.services.gateway.api.document import server
from rootstock_llm.services.gateway.api.document.document import document
from rootstock_llm.services.gateway.api.document.operation import ApiOperation
from rootstock_llm.services.gateway.api.openai import operations as openai
from rootstock_llm.services.gateway.api.openai.preparation import Preparer
from rootstock_llm.services.gateway.api.openai.render import ChatRenderer, CompletionRenderer, EmbeddingRenderer
from rootstock_llm.services.gateway.generation.errors import AnswerForm, ApiError, internal, model_not_allowed, unknown_model
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.generation.request import ModelInfo
from rootstock_llm.services.gateway.http.answer import GenerationEndpoint, HttpPort, json_response
from rootstock_llm.services.gateway.http.front_door import FrontDoor
from rootstock_llm.services.gateway.http.readiness import Readiness
from rootstock_llm.services.gateway.keys.key_ring import KeyRing
from rootstock_llm.services.gateway.observe.access_log import ERROR_CODE, AccessLog
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.playground import static_page
from rootstock_llm.services.gateway.service.sink import MakeOperation, Operation, stateless

_INFO = {"title": "Rootstock", "version": __version__, "description": "An OpenAI-compatible API, and SGLang's own."}
_RATE_LIMITS = [f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")]
# Response headers that a page of another origin may read.
_EXPOSED = ("x-request-id", "request-id", "retry-after", "x-rootstock-omitted-tools", "x-rootstock-stored", *_RATE_LIMITS)


class ApiRoutes(Protocol):
    """The routes of one HTTP API. Does not cover OpenAI's chat, completions and embeddings; generating_operations() adds them."""

    forms: Mapping[str, AnswerForm]  # form of errors by path, if it differs from OpenAI's

    @property
    def operations(self) -> Sequence[ApiOperation]:
        """The API's part of the OpenAPI document."""

    def generating(self) -> Mapping[str, MakeOperation]:
        """Returns the generating operations by path. The application serves each of them by POST."""

    def routes(self) -> Sequence[Route]:
        """Returns the routes of the API that do not generate."""


def generating_operations(preparer: Preparer, apis: Sequence[ApiRoutes]) -> dict[str, MakeOperation]:
    """Returns the generating operations of OpenAI's API and of `apis`, by path."""
    operations: dict[str, MakeOperation] = {
        openai.CHAT: stateless(Operation(preparer.chat, ChatRenderer)),
        openai.COMPLETIONS: stateless(Operation(preparer.completion, CompletionRenderer)),
        openai.EMBEDDINGS: stateless(Operation(preparer.embedding, EmbeddingRenderer)),
    }
    for api in apis:
        operations.update(api.generating())
    return operations


def build(
    port: HttpPort,
    keys: KeyRing,
    access: AccessLog,
    served: Callable[[], Sequence[ModelInfo]],
    generating: Mapping[str, MakeOperation],
    apis: Sequence[ApiRoutes],
    readiness: Readiness,
    metrics: GatewayMetrics,
    retry_after_s: Callable[[], int],
) -> ASGIApp:
    """Returns the gateway's ASGI application.

    Args:
        served: Returns the listed models, including those without a connected worker.
        generating: The generating operations of all APIs, by path.
        apis: All APIs except OpenAI's chat, completions and embeddings.
        retry_after_s: Returns the Retry-After of a 503 in seconds, from the current length of the queue.
    """
    settings = port.settings
    exposed_metrics = metrics if settings.metrics_on_http else None
    has_keys, origins = bool(settings.api_keys_file), settings.cors_allow_origins
    api_operations = [operation for api in apis for operation in api.operations]
    operations = (*openai.OPERATIONS, *api_operations, *server.operations(exposed_metrics is not None, settings.playground))
    pages = {server.DOCS: static_page.REFERENCE} if settings.docs_enabled else {}
    pages |= {server.PLAYGROUND: static_page.PLAYGROUND} if settings.playground else {}
    # A router tries its routes in order, so the generating ones, which have the most requests, come first.
    routes = [Route(path, GenerationEndpoint(port, make), methods=["POST"]) for path, make in generating.items()]
    for api in apis:
        routes += api.routes()
    routes += _model_routes(served)
    routes += _operational_routes(readiness, exposed_metrics)
    routes += [_page_route(path, static_page.static_page(name)) for path, name in pages.items()]
    if settings.docs_enabled:
        routes.append(_document_route(lambda: document(_INFO, operations, has_keys, bool(origins))))
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    _add_error_handlers(app)
    forms = {path: form for api in apis for path, form in api.forms.items()}
    paths = [operation.path for operation in operations]
    return _with_cors(FrontDoor(app, paths, keys, metrics, retry_after_s, forms, access, pages), origins)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wraps the application with CORS for `origins`. If `origins` is empty, returns the application unchanged.

    The wrapper is outside the check of API keys, because a browser sends preflight requests without an API key.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("DELETE", "GET", "HEAD", "OPTIONS", "POST", "PUT"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


def _error_response(request: Request, error: ApiError) -> Response:
    """Returns the error in the form of the API to which the path belongs."""
    state = request.scope["state"]
    state[ERROR_CODE] = error.code
    status, headers, body = state["form"].answer(error, state["request_id"])
    response = Response(body, status)
    response.raw_headers = headers
    return response


def _add_error_handlers(app: Starlette) -> None:
    async def on_http_error(request: Request, error: Exception) -> Response:
        """Responds to an unknown path (404), and to a method that the path does not have (405)."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _method_response(app, request)
        return _error_response(request, ApiError(error.status_code, f"{error.detail}.", code="not_found"))

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(request, error)

    async def on_fault(request: Request, error: Exception) -> Response:
        """Responds with 500 to an unexpected exception. Starlette then raises the exception again, and FrontDoor logs it."""
        return _error_response(request, internal())

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(Exception, on_fault)


def _method_response(app: Starlette, request: Request) -> Response:
    """Responds to a method without a route: OPTIONS gets the path's methods, any other method gets 405."""
    matching = [route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    exact = [route for route in matching if route.path == request.scope["path"]]
    allowed = {"OPTIONS"}.union(*(route.methods or () for route in exact or matching))
    response = Response(status_code=204)
    if request.method != "OPTIONS":
        response = _error_response(request, ApiError(405, "Method Not Allowed.", code="method_not_allowed"))
    response.headers["allow"] = ", ".join(sorted(allowed))
    return response


def _model_routes(served: Callable[[], Sequence[ModelInfo]]) -> list[Route]:
    started = int(time.time())

    def cards(request: Request) -> list[dict[str, Any]]:
        """Returns the cards of the models that the caller may use."""
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

    async def list_models(request: Request) -> Response:
        data = cards(request)
        names = [card["id"] for card in data] or [None]
        return json_response({"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})

    async def get_model(request: Request) -> Response:
        model_id = request.path_params["model_id"]
        if not request.scope["state"]["caller"].may_use(model_id):
            raise model_not_allowed()
        found = [card for card in cards(request) if card["id"] == model_id]
        if not found:
            raise unknown_model()
        return json_response(found[0])

    return [Route(openai.MODELS, list_models), Route(f"{openai.MODELS}/{{model_id:path}}", get_model)]


def _page_route(path: str, page: Response) -> Route:
    async def send_page(_: Request) -> Response:
        return page

    return Route(path, send_page)


def _document_route(make_document: Callable[[], Mapping[str, Any]]) -> Route:
    """Returns the route of the OpenAPI document. The first request makes the document."""

    @cache
    def response() -> Response:
        return JSONResponse(make_document())

    async def send_document(_: Request) -> Response:
        return response()

    return Route(server.DOCUMENT, send_document)


def _operational_routes(readiness: Readiness, metrics: GatewayMetrics | None) -> list[Route]:
    """Returns the routes for kubelets, balancers and Prometheus.

    Args:
        metrics: The metrics that /metrics returns. None if this port does not serve /metrics.
    """

    async def health(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def get_readiness(_: Request) -> Response:
        missing = readiness.missing()
        return json_response({"ready": not missing, "missing": missing}, 503 if missing else 200)

    async def get_ready(_: Request) -> Response:
        missing = readiness.refusal_reasons()
        return json_response({"ready": not missing, "missing": missing}, 503 if missing else 200)

    routes = [Route(server.HEALTH, health), Route(server.READINESS, get_readiness), Route(server.READY, get_ready)]
    if metrics is None:
        return routes
    registry = metrics.registry

    async def get_metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return [*routes, Route(server.METRICS, get_metrics)]
