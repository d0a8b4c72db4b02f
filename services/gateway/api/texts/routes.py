"""Routes that tokenize and parse texts, and routes that report the gateway's state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rootstock_llm.protos import tokenizer_pb2
from rootstock_llm.services import __version__
from rootstock_llm.services.gateway.api import prompts
from rootstock_llm.services.gateway.api.prompts import UNBOUNDED
from rootstock_llm.services.gateway.api.request_body import of_validation, parse_json
from rootstock_llm.services.gateway.api.texts.operations import (
    DETOKENIZE,
    LOAD,
    OPERATIONS,
    PARSE_CALL,
    PING,
    RANKING,
    SEPARATE,
    SERVER_INFO,
    TOKENIZE,
    VERSION,
)
from rootstock_llm.services.gateway.api.texts.parsing import calls_in, reasoning_in
from rootstock_llm.services.gateway.api.texts.types import DetokenizeRequest, ParseCallRequest, SeparateRequest, TokenizeRequest
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.gateway.generation.errors import AnswerForm, ApiError, bad_request
from rootstock_llm.services.gateway.generation.origin import Caller, Origin, origin_of
from rootstock_llm.services.gateway.generation.request import ModelInfo, PromptInput
from rootstock_llm.services.gateway.http.answer import HttpPort, json_response
from rootstock_llm.services.gateway.output.output_parser import MakeParser, Schema
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.gateway.service.sink import MakeOperation
from rootstock_llm.services.shared import limits

B = TypeVar("B", bound=Body)
ReadTools = Callable[[Sequence[Any]], Mapping[str, Schema | None]]  # returns parameters by tool name; raises ApiError
MayUse = Callable[[str], bool]  # whether an API key may use the model of this name; see Caller.may_use()
Loads = Callable[[MayUse], Sequence[Mapping[str, Any]]]  # returns the last load reports of the models' connected workers
ReadStatus = Callable[[MayUse], Mapping[str, Any]]  # returns the status of this gateway and of the models' workers


class Texts(Protocol):
    """Finds models and decodes token ids. Both methods may raise ApiError."""

    async def model_of(self, name: str | None, caller: Caller) -> ModelInfo: ...

    async def text_of(self, ids: Sequence[int], skip_special_tokens: bool, origin: Origin, model: ModelInfo) -> str: ...


class TextsApi:
    """The routes that tokenize and parse texts or report the gateway's state. Each process has one instance."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {}

    def __init__(
        self,
        port: HttpPort,
        texts: Texts,
        tokenizer: TokenizerClient,
        make_parser: MakeParser,
        read_tools: ReadTools,
        served: Callable[[], Sequence[ModelInfo]],
        loads: Loads,
        status: ReadStatus,
    ) -> None:
        self._port = port
        self._texts = texts
        self._tokenizer = tokenizer
        self._make_parser = make_parser
        self._read_tools = read_tools
        self._served = served
        self._loads = loads
        self._status = status

    def generating(self) -> Mapping[str, MakeOperation]:
        """Returns an empty mapping, because no route generates."""
        return {}

    def routes(self) -> list[Route]:
        return [
            Route(TOKENIZE, self._tokenize, methods=["POST"]),
            Route(DETOKENIZE, self._detokenize, methods=["POST"]),
            Route(PARSE_CALL, self._parse_function_call, methods=["POST"]),
            Route(SEPARATE, self._separate_reasoning, methods=["POST"]),
            Route(PING, _ping),
            Route(VERSION, _version),
            Route(LOAD, self._get_load),
            *(Route(path, self._server_info) for path in SERVER_INFO),
            *(Route(path, _refuse_ranking, methods=["POST"]) for path in RANKING),
        ]

    async def _tokenize(self, request: Request) -> Response:
        async with self._parsed_body(request, TokenizeRequest) as given:
            origin = origin_of(request.scope["state"])
            model = await self._texts.model_of(given.model, origin.caller)
            found = [list(each.ids) for each in await self._prompts(given, model, origin)]
        counts = [len(ids) for ids in found]
        single = isinstance(given.prompt, str)
        tokens, count = (found[0], counts[0]) if single else (found, counts)
        return json_response({"tokens": tokens, "count": count, "max_model_len": model.context_len})

    async def _detokenize(self, request: Request) -> Response:
        async with self._parsed_body(request, DetokenizeRequest) as given:
            origin = origin_of(request.scope["state"])
            model = await self._texts.model_of(given.model, origin.caller)
            skips = given.skip_special_tokens is not False
            lists = _lists_of(given.tokens, model)
            texts = [await self._texts.text_of(ids, skips, origin, model) if ids else "" for ids in lists]
        return json_response({"text": texts if _has_lists(given.tokens) else texts[0]})

    async def _prompts(self, given: TokenizeRequest, model: ModelInfo, origin: Origin) -> list[PromptInput]:
        texts = [given.prompt] if isinstance(given.prompt, str) else given.prompt
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise bad_request("prompt", "'prompt' must be a string or a list of strings.")
        if len(texts) > limits.MAX_BATCH_PROMPTS:
            raise bad_request("prompt", f"'prompt' may have at most {limits.MAX_BATCH_PROMPTS} texts.")
        special = given.add_special_tokens is not False
        call = tokenizer_pb2.EncodeRequest(request_id=origin.request_id, texts=texts, add_special_tokens=special)
        return await prompts.of_texts(call, self._tokenizer, "prompt", model, origin, UNBOUNDED)

    async def _parse_function_call(self, request: Request) -> Response:
        async with self._parsed_body(request, ParseCallRequest) as given:
            tools = self._read_tools(given.tools)
            found = await calls_in(given.text, tools, given.tool_call_parser, self._make_parser)
        return json_response(found)

    async def _separate_reasoning(self, request: Request) -> Response:
        async with self._parsed_body(request, SeparateRequest) as given:
            found = await reasoning_in(given.text, given.reasoning_parser, self._make_parser)
        return json_response(found)

    async def _get_load(self, request: Request) -> Response:
        caller: Caller = request.scope["state"]["caller"]
        return json_response(self._loads(caller.may_use))

    async def _server_info(self, request: Request) -> Response:
        caller: Caller = request.scope["state"]["caller"]
        served = [model for model in self._served() if caller.may_use(model.name)]
        default = served[0] if len(served) == 1 else None
        name = "" if default is None else default.name
        return json_response(
            {
                "version": __version__,
                "model_path": name,
                "served_model_name": name,
                "models": [
                    {
                        "id": model.name,
                        "max_model_len": model.context_len,
                        "vocab_size": model.vocab_size,
                        "is_generation": model.generates,
                        "embedding_size": model.embedding_size,
                        "deterministic": model.deterministic,
                        "quantization": model.quantization,
                    }
                    for model in served
                ],
                "loads": self._loads(caller.may_use),
                **self._status(caller.may_use),
            }
        )

    @asynccontextmanager
    async def _parsed_body(self, request: Request, model: type[B]) -> AsyncIterator[B]:
        """Yields the parsed body.

        Its bytes stay reserved in the body budget until the `async with` block ends. Raises ApiError.
        """
        async with self._port.bodies.read(request.scope, request.receive) as body:
            try:
                given = model.model_validate(parse_json(body.take()))
            except ValidationError as error:
                raise of_validation(error) from None
            yield given


async def _ping(_: Request) -> Response:
    return Response()


async def _version(_: Request) -> Response:
    return json_response({"version": __version__})


async def _refuse_ranking(_: Request) -> Response:
    message = "This path is not supported. To get probabilities of labels from a generating model, use /v1/score."
    raise ApiError(400, message, code="unsupported_endpoint")


def _has_lists(tokens: Any) -> bool:
    return isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)


def _lists_of(tokens: Any, model: ModelInfo) -> list[Sequence[int]]:
    """Returns the lists of token ids to decode. Raises ApiError if `tokens` is neither a list of ids nor a list of lists."""
    if not isinstance(tokens, list):
        raise bad_request("tokens", "'tokens' must be a list of token ids or a list of such lists.")
    lists, many = (tokens, True) if _has_lists(tokens) else ([tokens], False)
    if len(lists) > limits.MAX_BATCH_PROMPTS:
        raise bad_request("tokens", f"'tokens' may have at most {limits.MAX_BATCH_PROMPTS} lists.")
    found: list[Sequence[int]] = []
    for index, ids in enumerate(lists):
        where = f"tokens[{index}]" if many else "tokens"
        if not isinstance(ids, list):
            raise bad_request(where, f"'{where}' must be a list of token ids.")
        found.append(prompts.of_ids(ids, model.vocab_size, where).ids)
    return found
