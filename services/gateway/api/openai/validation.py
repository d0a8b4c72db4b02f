"""A request's body → Generation, or an ApiError that names the field. Pure: no I/O, nothing is allocated anywhere.

Error messages never repeat what the client sent.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from rootstock.v1 import common_pb2 as pb
from services.gateway.api import known_fields
from services.gateway.api.body_errors import of_validation
from services.gateway.api.cache_key import cache_key
from services.gateway.api.constraints import constraint_of
from services.gateway.api.known_fields import KnownFields, refuse_unserved
from services.gateway.api.openai.types import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationBody,
    NamedBody,
)
from services.gateway.api.sampling_fields import check_token_ids
from services.gateway.api.session_fields import session_turn
from services.gateway.api.translation import Common, Wanted, generation_of
from services.gateway.api.translation import embedding_generation as vector_of
from services.gateway.request import client_fields
from services.gateway.request.client_fields import ClientFields
from services.gateway.request.errors import bad_request
from services.gateway.request.generation import Generation
from services.gateway.request.origin import Origin
from services.shared.observe.log_fields import fields
from services.shared.sampling_parameters import COMPLETION_TOKENS, Api

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=NamedBody)


def parse_chat(body: dict[str, Any], origin: Origin) -> ChatCompletionRequest:
    return _parse(ChatCompletionRequest, body, known_fields.CHAT, origin)


def parse_completion(body: dict[str, Any], origin: Origin) -> CompletionRequest:
    return _parse(CompletionRequest, body, known_fields.COMPLETION, origin)


def parse_embedding(body: dict[str, Any], origin: Origin) -> EmbeddingRequest:
    return _parse(EmbeddingRequest, body, known_fields.EMBEDDING, origin)


def _parse(model: type[B], body: dict[str, Any], known: KnownFields, origin: Origin) -> B:
    refuse_unserved(body, known)
    if logger.isEnabledFor(logging.DEBUG):
        unknown = body.keys() - model.model_fields.keys() - known.neutral.keys() - known.unused
        if unknown:
            names = sorted(name[:64] for name in unknown)
            logger.debug("ignored unknown fields", extra=fields(**origin.log_fields, names=names))
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from None
    if request.rid is not None and request.request_id not in (None, request.rid):
        raise bad_request("request_id", "'rid' and 'request_id' both name the request, and differently.")
    return request


def chat_generation(request: ChatCompletionRequest, vocab_size: int) -> Generation:
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    logprobs = pb.Logprobs(top=request.top_logprobs or 0) if request.logprobs else None
    most = request.max_completion_tokens or request.max_tokens
    return _generation(request, Api.CHAT, vocab_size, most, logprobs, client_fields.CHAT)


def completion_generation(request: CompletionRequest, vocab_size: int) -> Generation:
    """With echo the prompt's log probabilities are wanted too."""
    given = (request.max_completion_tokens, request.max_tokens, COMPLETION_TOKENS)
    most = next(value for value in given if value is not None)
    if most == 0 and not request.echo:
        raise bad_request("max_tokens", "'max_tokens' can be 0 with 'echo' only.")
    logprobs, made = None, _candidates(request)
    if request.logprobs is not None:
        logprobs = pb.Logprobs(top=request.logprobs, prompt_from=0 if request.echo else None)
    elif made:
        logprobs = pb.Logprobs()
    generation = _generation(request, Api.COMPLETION, vocab_size, most, logprobs, client_fields.COMPLETION)
    if not made:
        return generation
    return replace(generation, n=made, best=generation.n, shows_logprobs=request.logprobs is not None)


def _candidates(request: CompletionRequest) -> int:
    """That are made for each prompt, where not all of them are answered; else 0."""
    n, made = request.n or 1, request.best_of
    if made is None or made == n:
        return 0
    if made < n:
        raise bad_request("best_of", "'best_of' is less than 'n'.")
    if request.stream:
        raise bad_request("best_of", "'best_of' above 'n' cannot be streamed: the best are known at the end.")
    return made


def embedding_generation(request: EmbeddingRequest, embedding_size: int) -> Generation:
    if (request.dimensions or 0) > embedding_size:
        raise bad_request("dimensions", f"'dimensions' may be at most {embedding_size}, which is what this model gives.")
    common = Common.of(request, cache_key(request.cache_salt, request.extra_key))
    embedding = pb.Embedding(dimensions=request.dimensions, normalize=request.normalize)
    vector = vector_of(common, embedding, client_fields.EMBEDDING)
    return replace(vector, vector_as_base64=request.encoding_format == "base64")


def _generation(
    request: GenerationBody,
    api: Api,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: pb.Logprobs | None,
    names: ClientFields,
) -> Generation:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "'stream_options' needs 'stream' to be true.")
    check_token_ids(request.logprob_token_ids or (), vocab_size, "logprob_token_ids")
    if logprobs is not None:
        logprobs.token_ids.extend(request.logprob_token_ids or ())
    elif request.logprob_token_ids:
        raise bad_request("logprob_token_ids", "'logprob_token_ids' needs 'logprobs'.")
    salt, turn = cache_key(request.cache_salt, request.extra_key), session_turn(request.session_params)
    common = Common.of(request, salt, bool(request.stream), turn)
    wanted = Wanted(
        max_tokens,
        logprobs,
        constraint_of(request),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        include_stop=_include_stop(request),
        answer=request.shown(),
        fields=names,
    )
    return generation_of(request, api, common, wanted, vocab_size)


def _include_stop(request: GenerationBody) -> bool:
    keeps, trims_not = request.include_stop_str_in_output, request.no_stop_trim
    if None not in (keeps, trims_not) and keeps != trims_not:
        raise bad_request("no_stop_trim", "'no_stop_trim' and 'include_stop_str_in_output' say the opposite.")
    return bool(keeps or trims_not)
