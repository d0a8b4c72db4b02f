"""The HTTP routes and their documentation. How one is answered is in services/gateway/http/exchange.py; here is only
what FastAPI is asked to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from services.gateway.api.openai.embeddings import EmbeddingRenderer
from services.gateway.api.openai.preparation import Preparer
from services.gateway.api.openai.render import ChatRenderer, CompletionRenderer
from services.gateway.api.openai.types import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from services.gateway.http.direct_routes import DirectRoutes, Endpoint
from services.gateway.http.exchange import Exchange, Generator
from services.gateway.http.front_door import FrontDoor
from services.gateway.http.readiness import Readiness
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.errors import ApiError, unknown_model
from services.gateway.request.generation import ModelInfo

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MODELS = "/v1/models"
_OPERATIONS = ("/health", "/readiness", "/metrics", "/docs", "/openapi.json")
_ROUTES = (CHAT, COMPLETIONS, EMBEDDINGS, MODELS, *_OPERATIONS)
_OPENAI_BODIES: tuple[type[BaseModel], ...] = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest)
_RATE_LIMITS = [
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens", "concurrency")
]
_EXPOSED = ("x-request-id", "retry-after", *_RATE_LIMITS)  # of an answer's headers, to a page of another origin
_SCHEMA_REF = "#/components/schemas/{model}"


class NativeRoutes(Protocol):
    """SGLang's own API. routes: their paths. bodies: what they take."""

    @property
    def routes(self) -> Sequence[str]: ...

    @property
    def bodies(self) -> Sequence[type[BaseModel]]: ...

    def add_routes(self, app: FastAPI) -> Mapping[str, Endpoint]:
        """Returns what generates, by path."""


def build(
    generator: Generator,
    preparer: Preparer,
    served: Callable[[], Sequence[ModelInfo]],
    native: NativeRoutes,
    readiness: Readiness,
    metrics: GatewayMetrics,
    retry_after_s: Callable[[], int],
) -> ASGIApp:
    """served: the models that are. retry_after_s: of a 503, by what waits."""
    settings = generator.settings
    app = FastAPI(
        title="Rootstock",
        description="An OpenAI-compatible API, and SGLang's own.",
        redoc_url=None,
        docs_url="/docs" if settings.docs_enabled else None,
        openapi_url="/openapi.json" if settings.docs_enabled else None,
    )
    _add_errors(app)
    endpoints = {**_add_generation(app, generator, preparer), **native.add_routes(app)}
    _add_models(app, served)
    _add_operations(app, readiness, metrics if settings.metrics_on_http else None)
    _document_bodies(app, (*_OPENAI_BODIES, *native.bodies))
    routes = (*_ROUTES, *native.routes)
    door = FrontDoor(DirectRoutes(app, endpoints), routes, generator.keys, metrics, retry_after_s)
    return _with_cors(door, settings.cors_allow_origins)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Outermost: a browser asks beforehand without a key."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "OPTIONS", "POST", "PUT"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _error_response(error: ApiError) -> Response:
    response = Response(error.json(), error.status)
    response.raw_headers = error.headers()
    return response


def _add_errors(app: FastAPI) -> None:
    async def on_http_error(request: Request, error: Exception) -> Response:
        """No such route (404) or no such method on it (405)."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _other_method(app, request)
        return _error_response(ApiError(error.status_code, f"{error.detail}.", code=str(error.detail).lower().replace(" ", "_")))

    async def on_api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(error)

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ApiError, on_api_error)


def _other_method(app: FastAPI, request: Request) -> Response:
    """To OPTIONS: what may be asked of the path. To others: that they may not be."""
    met = [route for route in app.router.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    allowed = {"OPTIONS"}.union(*(route.methods or () for route in met))
    if "GET" in allowed:
        allowed.add("HEAD")
    response = Response(status_code=204)
    if request.method != "OPTIONS":
        response = _error_response(ApiError(405, "Method Not Allowed.", code="method_not_allowed"))
    response.headers["allow"] = ", ".join(sorted(allowed))
    return response


def _add_generation(app: FastAPI, generator: Generator, preparer: Preparer) -> Mapping[str, Endpoint]:
    @app.post(CHAT, tags=["OpenAI"], summary="Chat completion", openapi_extra=_body_of(ChatCompletionRequest))
    async def chat_completions() -> Response:
        return Exchange(generator, preparer.chat, ChatRenderer)

    @app.post(COMPLETIONS, tags=["OpenAI"], summary="Completion", openapi_extra=_body_of(CompletionRequest))
    async def completions() -> Response:
        return Exchange(generator, preparer.completion, CompletionRenderer)

    @app.post(EMBEDDINGS, tags=["OpenAI"], summary="Embeddings", openapi_extra=_body_of(EmbeddingRequest))
    async def embeddings() -> Response:
        return Exchange(generator, preparer.embedding, EmbeddingRenderer)

    return {CHAT: chat_completions, COMPLETIONS: completions, EMBEDDINGS: embeddings}


def _add_models(app: FastAPI, served: Callable[[], Sequence[ModelInfo]]) -> None:
    started = int(time.time())

    def cards() -> list[dict[str, Any]]:
        return [
            {
                "id": model.name,
                "object": "model",
                "created": started,
                "owned_by": "rootstock",
                "max_model_len": model.context_len,
                "sampling_defaults": model.defaults.as_dict(),
            }
            for model in served()
        ]

    @app.get(MODELS, tags=["OpenAI"], summary="Models that are served")
    async def models() -> Response:
        return _json({"object": "list", "data": cards()})

    @app.get(MODELS + "/{model_id:path}", tags=["OpenAI"], summary="One model")
    async def model(model_id: str) -> Response:
        found = [card for card in cards() if card["id"] == model_id]
        if not found:
            raise unknown_model()
        return _json(found[0])


def _add_operations(app: FastAPI, readiness: Readiness, metrics: GatewayMetrics | None) -> None:
    @app.get("/health", tags=["Operations"], summary="Liveness")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/readiness", tags=["Operations"], summary="Whether requests can be answered, and what is missing")
    async def ready() -> Response:
        missing = readiness.missing()
        return _json({"ready": not missing, "missing": missing}, 503 if missing else 200)

    if metrics is None:
        return

    @app.get("/metrics", tags=["Operations"], summary="Prometheus metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _SCHEMA_REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _document_bodies(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """The bodies are read and checked outside FastAPI, so their schemas are added to its document here."""
    plain: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        _, definitions = models_json_schema(
            [(model, "validation") for model in bodies],
            ref_template=_SCHEMA_REF,
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
