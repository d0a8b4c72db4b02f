"""A request's body → Generation, or an ApiError that names the field. Pure: no I/O, nothing is allocated anywhere.

Error messages never repeat what the client sent.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, TypeVar

import orjson
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
from services.gateway.api.sampling_fields import check_token_ids, dry, logit_bias, stop_regexes, stop_strings, token_id_set
from services.gateway.api.session_fields import session_turn
from services.gateway.request import client_fields
from services.gateway.request.errors import bad_request
from services.gateway.request.generation import Generation
from services.gateway.request.origin import Origin
from services.shared.observe.log import fields

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16

B = TypeVar("B", bound=NamedBody)


def parse_json(body: bytes) -> dict[str, Any]:
    """Raises ApiError for anything but an object of strict JSON (no NaN, no lone surrogates, depth below 1024)."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise bad_request(None, "The body is not valid JSON.", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object.", "invalid_json")
    return value


def dump_json(value: Any, param: str) -> bytes:
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, RecursionError):
        raise bad_request(param, f"'{param}' is nested too deeply.") from None


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
    return replace(_generation(request, vocab_size, most, logprobs), fields=client_fields.CHAT)


def completion_generation(request: CompletionRequest, vocab_size: int) -> Generation:
    """With echo the prompt's log probabilities are wanted too."""
    given = (request.max_completion_tokens, request.max_tokens, DEFAULT_COMPLETION_TOKENS)
    most = next(value for value in given if value is not None)
    if most == 0 and not request.echo:
        raise bad_request("max_tokens", "'max_tokens' can be 0 with 'echo' only.")
    logprobs = None
    if request.logprobs is not None:
        logprobs = pb.Logprobs(top=request.logprobs, prompt_from=0 if request.echo else None)
    generation = _generation(request, vocab_size, most, logprobs)
    return replace(generation, max_tokens=max(1, most), hidden=most == 0, fields=client_fields.COMPLETION)


def embedding_generation(request: EmbeddingRequest, embedding_size: int) -> Generation:
    if (request.dimensions or 0) > embedding_size:
        raise bad_request("dimensions", f"'dimensions' may be at most {embedding_size}, which is what this model gives.")
    embedding = pb.Embedding(dimensions=request.dimensions, normalize=request.normalize)
    return Generation(
        stream=False,
        include_usage=False,
        n=1,
        seed=None,
        max_tokens=1,
        sampling=pb.SamplingParams(embedding=embedding),
        stop_token_ids=frozenset(),
        skip_special_tokens=True,
        include_stop=False,
        return_token_ids=False,
        cache_salt=cache_key(request.cache_salt, request.extra_key),
        priority=request.priority or 0,
        routing_key=request.routing_key or "",
        vector_as_base64=request.encoding_format == "base64",
        fields=client_fields.EMBEDDING,
    )


def _generation(request: GenerationBody, vocab_size: int, max_tokens: int | None, logprobs: pb.Logprobs | None) -> Generation:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "'stream_options' needs 'stream' to be true.")
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise bad_request("min_tokens", "'min_tokens' is greater than the most tokens that are allowed.")
    constraint = constraint_of(request)
    sampling = _sampling(request, vocab_size)
    if logprobs is not None:
        logprobs.token_ids.extend(request.logprob_token_ids or ())
        sampling.logprobs.CopyFrom(logprobs)
    elif request.logprob_token_ids:
        raise bad_request("logprob_token_ids", "'logprob_token_ids' needs 'logprobs'.")
    if constraint is not None:
        sampling.grammar.CopyFrom(constraint[1])
    return Generation(
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        n=request.n or 1,
        seed=request.seed,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop=_include_stop(request),
        return_token_ids=bool(request.return_token_ids),
        cache_salt=cache_key(request.cache_salt, request.extra_key),
        priority=request.priority or 0,
        routing_key=request.routing_key or "",
        session=session_turn(request.session_params),
        grammar_field=constraint[0] if constraint else None,
    )


def _include_stop(request: GenerationBody) -> bool:
    keeps, trims_not = request.include_stop_str_in_output, request.no_stop_trim
    if None not in (keeps, trims_not) and keeps != trims_not:
        raise bad_request("no_stop_trim", "'no_stop_trim' and 'include_stop_str_in_output' say the opposite.")
    return bool(keeps or trims_not)


def _sampling(request: GenerationBody, vocab_size: int) -> pb.SamplingParams:
    for field in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logprob_token_ids"):
        check_token_ids(getattr(request, field) or (), vocab_size, field)
    bias = logit_bias(request.logit_bias or {}, vocab_size)
    return pb.SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        min_new_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        stream_interval=request.stream_interval,
        logit_bias_ids=bias.keys(),
        logit_bias_values=bias.values(),
        stop_token_ids=request.stop_token_ids,
        stop=stop_strings(request.stop),
        stop_regex=stop_regexes(request.stop_regex),
        allowed_token_ids=token_id_set(request.allowed_token_ids),
        banned_token_ids=token_id_set(request.banned_token_ids),
        dry=dry(request),
    )
