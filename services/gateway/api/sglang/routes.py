"""Routes of SGLang's native API: generation, embeddings, scores, aborts, sessions, health and model info."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rootstock_llm.services.gateway.api.request_body import parse_json
from rootstock_llm.services.gateway.api.sglang.call import EncodeCall, GenerateCall, PromptSource
from rootstock_llm.services.gateway.api.sglang.operations import (
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
from rootstock_llm.services.gateway.api.sglang.render import WEIGHT_VERSION
from rootstock_llm.services.gateway.api.sglang.sampling import M, parse
from rootstock_llm.services.gateway.api.sglang.score import ScoreCall
from rootstock_llm.services.gateway.api.sglang.types import (
    AbortRequest,
    CloseSessionRequest,
    OpenSessionRequest,
)
from rootstock_llm.services.gateway.dispatch.sessions import SessionCalls
from rootstock_llm.services.gateway.generation.abort import Aborter, AbortScope
from rootstock_llm.services.gateway.generation.errors import AnswerForm, ApiError, bad_request, unavailable
from rootstock_llm.services.gateway.generation.request import Models
from rootstock_llm.services.gateway.http.answer import GenerationEndpoint, HttpPort, json_response
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.gateway.service.sink import MakeOperation, Operation
from rootstock_llm.services.shared.limits import SMALL_BODY_BYTES


class NativeApi:
    """The routes of SGLang's native API. Each process has one instance."""

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
        """Makes the routes.

        Args:
            failure: Generates one token as a health check. Returns the reason if this fails, otherwise "".
        """
        self._port = port
        self._models = models
        self._tokenizer = tokenizer
        self._source = PromptSource(tokenizer)
        self._aborter = aborter
        self._sessions = sessions
        self._failure = failure

    def generating(self) -> Mapping[str, MakeOperation]:
        """Returns the generating operations by path."""
        return {GENERATE: self._generate, ENCODE: self._encode, **dict.fromkeys(SCORE, self._score)}

    def routes(self) -> list[Route]:
        """Returns the routes that do not generate, and PUT /generate, because generating() covers POST only."""
        return [
            Route(GENERATE, GenerationEndpoint(self._port, self._generate), methods=["PUT"]),
            Route(ABORT, self._abort, methods=["POST"]),
            Route(OPEN_SESSION, self._open_session, methods=["POST"]),
            Route(CLOSE_SESSION, self._close_session, methods=["POST"]),
            Route(HEALTH_GENERATE, self._health_generate),
            *(Route(path, self._model_info) for path in MODEL_INFO),
        ]

    def _generate(self) -> Operation:
        call = GenerateCall(self._models, self._source)
        return Operation(call.prepare, call.renderer)

    def _encode(self) -> Operation:
        call = EncodeCall(self._models, self._source)
        return Operation(call.prepare, call.renderer)

    def _score(self) -> Operation:
        call = ScoreCall(self._models, self._tokenizer)
        return Operation(call.prepare, call.renderer)

    async def _abort(self, request: Request) -> Response:
        given = await self._parsed_body(request, AbortRequest)
        if given.abort_all:
            message = "'abort_all' aborts the requests of all API keys. It is allowed only on the admin port."
            raise ApiError(403, message, param="abort_all", code="forbidden")
        if not given.rid:
            raise bad_request("rid", "'rid' is required.", "missing_required_parameter")
        report = await self._aborter.abort(AbortScope(given.rid, request.scope["state"]["key"]))
        return json_response(report.body())

    async def _open_session(self, request: Request) -> Response:
        given = await self._parsed_body(request, OpenSessionRequest)
        model = await self._models.wait_for(given.model, request.scope["state"]["caller"])
        # In SGLang, capacity_of_str_len counts characters. Here it counts tokens. This is rarely a stricter limit, because a text
        # rarely has more tokens than characters.
        key, max_tokens = request.scope["state"]["key"], given.capacity_of_str_len
        return json_response(await self._sessions.open(model.name, key, given.session_id, max_tokens, given.timeout))

    async def _close_session(self, request: Request) -> Response:
        given = await self._parsed_body(request, CloseSessionRequest)
        model = await self._models.wait_for(given.model, request.scope["state"]["caller"])
        await self._sessions.close(model.name, request.scope["state"]["key"], given.session_id)
        return Response()

    async def _health_generate(self, _: Request) -> Response:
        failure = await self._failure()
        if failure:
            raise unavailable(failure, self._port.settings.retry_after_s)
        return Response()

    async def _model_info(self, request: Request) -> Response:
        model = await self._models.wait_for(None, request.scope["state"]["caller"])
        return json_response(
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
                "quantization": model.quantization,
            }
        )

    async def _parsed_body(self, request: Request, model: type[M]) -> M:
        """Returns the parsed body. Raises ApiError if it is invalid."""
        async with self._port.bodies.read(request.scope, request.receive, SMALL_BODY_BYTES) as body:
            return parse(model, parse_json(body.take()))
