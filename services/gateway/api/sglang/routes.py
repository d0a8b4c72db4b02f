"""SGLang's native HTTP routes: /generate, /encode, aborts, sessions, and what the server says of itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from services.gateway.api.sglang.call import EncodeCall, GenerateCall, PromptSource
from services.gateway.api.sglang.operations import (
    ABORT,
    CLOSE_SESSION,
    ENCODE,
    GENERATE,
    HEALTH_GENERATE,
    MODEL_INFO,
    OPEN_SESSION,
    OPERATIONS,
    SCORE,
)
from services.gateway.api.sglang.render import WEIGHT_VERSION
from services.gateway.api.sglang.sampling import M, parse
from services.gateway.api.sglang.score import ScoreCall
from services.gateway.api.sglang.types import (
    AbortRequest,
    CloseSessionRequest,
    OpenSessionRequest,
)
from services.gateway.api.strict_json import parse_json
from services.gateway.dispatch.sessions import SessionCalls
from services.gateway.http.answer import HttpPort, endpoint_of
from services.gateway.peers.tokenizer_client import TokenizerClient
from services.gateway.request.abort import Aborter, AbortScope
from services.gateway.request.errors import AnswerForm, ApiError, bad_request, unavailable
from services.gateway.request.generation import Models
from services.gateway.service.sink import MakeOperation, Operation
from services.shared.limits import SMALL_BODY_BYTES


class NativeApi:
    """What the routes work with. One per process."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {}

    def __init__(
        self,
        port: HttpPort,
        models: Models,
        tokenizer: TokenizerClient,
        aborter: Aborter,
        sessions: SessionCalls,
        failure: Callable[[], Awaitable[str]],
    ) -> None:
        """failure: why no answer can be made; "" if one can."""
        self._port = port
        self._models = models
        self._tokenizer = tokenizer
        self._source = PromptSource(tokenizer)
        self._aborter = aborter
        self._sessions = sessions
        self._failure = failure

    def add_routes(self, app: FastAPI) -> Mapping[str, MakeOperation]:
        """Returns what generates, by path."""
        self._add_abort(app)
        self._add_sessions(app)
        self._add_state(app)
        return self._add_generation(app)

    def _add_generation(self, app: FastAPI) -> Mapping[str, MakeOperation]:
        def generate() -> Operation:
            call = GenerateCall(self._models, self._source)
            return Operation(call.prepare, call.renderer)

        def encode() -> Operation:
            call = EncodeCall(self._models, self._source)
            return Operation(call.prepare, call.renderer)

        def score() -> Operation:
            call = ScoreCall(self._models, self._tokenizer)
            return Operation(call.prepare, call.renderer)

        made = {GENERATE: generate, ENCODE: encode, **dict.fromkeys(SCORE, score)}
        for path, make in made.items():
            app.post(path)(endpoint_of(self._port, make))
        app.put(GENERATE)(endpoint_of(self._port, generate))
        return made

    def _add_abort(self, app: FastAPI) -> None:
        @app.post(ABORT)
        async def abort_request(request: Request) -> Response:
            given = await self._read(request, AbortRequest)
            if given.abort_all:
                message = "'abort_all' ends everybody's requests: it is for operators, on the admin port."
                raise ApiError(403, message, param="abort_all", code="forbidden")
            if not given.rid:
                raise bad_request("rid", "'rid' is required.", "missing_required_parameter")
            report = await self._aborter.abort(AbortScope(given.rid, request.scope["state"]["key"]))
            return _json(report.body())

    def _add_sessions(self, app: FastAPI) -> None:
        @app.post(OPEN_SESSION)
        async def open_session(request: Request) -> Response:
            given = await self._read(request, OpenSessionRequest)
            model = await self._models.wait_for(given.model, request.scope["state"]["caller"])
            # A text of so many characters has about as many tokens at most.
            key, most = request.scope["state"]["key"], given.capacity_of_str_len
            return _json(await self._sessions.open(model.name, key, given.session_id, most, given.timeout))

        @app.post(CLOSE_SESSION)
        async def close_session(request: Request) -> Response:
            given = await self._read(request, CloseSessionRequest)
            model = await self._models.wait_for(given.model, request.scope["state"]["caller"])
            await self._sessions.close(model.name, request.scope["state"]["key"], given.session_id)
            return Response()

    def _add_state(self, app: FastAPI) -> None:
        @app.get(HEALTH_GENERATE)
        async def health_generate() -> Response:
            failure = await self._failure()
            if failure:
                raise unavailable(failure, self._port.settings.retry_after_s)
            return Response()

        for path in MODEL_INFO:
            app.get(path)(self._model_info)

    async def _model_info(self, request: Request) -> Response:
        model = await self._models.wait_for(None, request.scope["state"]["caller"])
        return _json(
            {
                "model_path": model.name,
                "tokenizer_path": model.name,
                "is_generation": model.generates,
                "preferred_sampling_params": model.defaults.as_dict(),
                "weight_version": WEIGHT_VERSION,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "max_model_len": model.context_len,
                "vocab_size": model.vocab_size,
                "embedding_size": model.embedding_size,
            }
        )

    async def _read(self, request: Request, model: type[M]) -> M:
        """Raises ApiError."""
        async with self._port.bodies.read(request.scope, request.receive, SMALL_BODY_BYTES) as body:
            return parse(model, parse_json(body.take()))


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
