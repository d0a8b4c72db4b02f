"""Checks the bodies of OpenAI's endpoints, and makes the GenerationParams of completions and embeddings. Pure; raises ApiError.

Error messages never repeat a value that the client sent.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from rootstock.v1 import common_pb2 as pb
from services.gateway.api.constraints import constraint_of
from services.gateway.api.generation_params import check_token_ids, embedding_generation, generation_of
from services.gateway.api.known_fields import KnownFields, refuse_unserved
from services.gateway.api.openai.types import CompletionRequest, EmbeddingRequest, GenerationBody, NamedBody
from services.gateway.api.request_body import joined_salt, of_validation, session_turn
from services.gateway.request import field_names
from services.gateway.request.errors import bad_request
from services.gateway.request.generation import GenerationParams
from services.gateway.request.origin import Origin
from services.shared.observe.log_fields import fields
from services.shared.sampling_parameters import COMPLETION_TOKENS, Api

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=NamedBody)


def parse(model: type[B], body: dict[str, Any], known: KnownFields, origin: Origin) -> B:
    """Returns the checked body. Raises ApiError."""
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


def completion_generation(request: CompletionRequest, vocab_size: int) -> GenerationParams:
    """Returns the generation of each prompt. With echo, it includes the prompt's log probabilities."""
    given = (request.max_completion_tokens, request.max_tokens, COMPLETION_TOKENS)
    most = next(value for value in given if value is not None)
    if most == 0 and not request.echo:
        raise bad_request("max_tokens", "'max_tokens' can be 0 with 'echo' only.")
    logprobs, made = None, _candidates(request)
    if request.logprobs is not None:
        logprobs = pb.Logprobs(top=request.logprobs, prompt_from=0 if request.echo else None)
    elif made:
        logprobs = pb.Logprobs()
    check_stream_options(request)
    check_token_ids(request.logprob_token_ids or (), vocab_size, "logprob_token_ids")
    if logprobs is not None:
        logprobs.token_ids.extend(request.logprob_token_ids or ())
    elif request.logprob_token_ids:
        raise bad_request("logprob_token_ids", "'logprob_token_ids' needs 'logprobs'.")
    generation = generation_of(
        request,
        Api.COMPLETION,
        vocab_size,
        field_names.COMPLETION,
        max_tokens=most,
        min_tokens=request.min_tokens,
        seed=request.seed,
        logprobs=logprobs,
        constraint=constraint_of(request),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        include_stop=include_stop(request),
        answer=request.shown(),
        cache_salt=joined_salt(request.cache_salt, request.extra_key),
        priority=request.priority,
        routing_key=request.routing_key or "",
        session=session_turn(request.session_params),
    )
    if not made:
        return generation
    return replace(generation, n=made, best=generation.n, shows_logprobs=request.logprobs is not None)


def _candidates(request: CompletionRequest) -> int:
    """Returns the number of outputs that are generated per prompt if not all of them are returned, else 0."""
    n, made = request.n or 1, request.best_of
    if made is None or made == n:
        return 0
    if made < n:
        raise bad_request("best_of", "'best_of' is less than 'n'.")
    if request.stream:
        raise bad_request("best_of", "'best_of' above 'n' cannot be streamed: the best are known at the end.")
    return made


def vector_generation(request: EmbeddingRequest, embedding_size: int) -> GenerationParams:
    """Returns the generation of each input's vector."""
    if (request.dimensions or 0) > embedding_size:
        raise bad_request("dimensions", f"'dimensions' may be at most {embedding_size}, the size of this model's vectors.")
    embedding = pb.Embedding(dimensions=request.dimensions, normalize=request.normalize)
    salt = joined_salt(request.cache_salt, request.extra_key)
    vector = embedding_generation(request, salt, embedding, field_names.EMBEDDING)
    return replace(vector, vector_as_base64=request.encoding_format == "base64")


def check_stream_options(request: GenerationBody) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "'stream_options' needs 'stream' to be true.")


def include_stop(request: GenerationBody) -> bool:
    """Returns whether the text keeps a matched stop string."""
    keeps, trims_not = request.include_stop_str_in_output, request.no_stop_trim
    if None not in (keeps, trims_not) and keeps != trims_not:
        raise bad_request("no_stop_trim", "'no_stop_trim' and 'include_stop_str_in_output' say the opposite.")
    return bool(keeps or trims_not)
