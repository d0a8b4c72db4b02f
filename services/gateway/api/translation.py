"""Parameters of a request of any API → GenerationParams, whose sampling parameters are the message that workers receive.

Pure; raises ApiError. Errors name the API's own field, and their messages never repeat a value that the client sent.
"""

from __future__ import annotations

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.api.constraints import Named
from services.gateway.api.request_body import PlacedBody, SamplingBody
from services.gateway.api.sampling_fields import check_token_ids, dry, logit_bias, stop_regexes, stop_strings, token_id_set
from services.gateway.request.bodies import TEXT_ALONE, AnswerBody
from services.gateway.request.errors import bad_request
from services.gateway.request.field_names import SCORE, FieldNames
from services.gateway.request.generation import GenerationParams, one_step
from services.shared.sampling_parameters import (
    ALLOWED_TOKEN_IDS,
    BANNED_TOKEN_IDS,
    SCALAR,
    SCALARS,
    STOP_TOKEN_IDS,
    Api,
)

_SAME_NAMES = tuple(row.wire for row in SCALARS if set(row.names.values()) == {row.wire})  # in every API
_POSITIVE = tuple(row for row in SCALARS if row.excludes_low)


def generation_of(
    body: SamplingBody,
    api: Api,
    vocab_size: int,
    fields: FieldNames,
    *,
    max_tokens: int | None,
    min_tokens: int | None,
    seed: int | None,
    logprobs: pb.Logprobs | None,
    constraint: Named | None,
    stream: bool,
    cache_salt: str,
    priority: int | None,
    routing_key: str,
    session: worker_pb2.SessionTurn | None,
    include_usage: bool = False,
    include_stop: bool | None = None,
    answer: AnswerBody = TEXT_ALONE,
) -> GenerationParams:
    """Returns the generation of each prompt of a request. Raises ApiError.

    Args:
        api: API whose names `body` and the errors use.
        max_tokens: None: all that the context allows. 0, which only some APIs accept: no token.
        constraint: The client's field, and the grammar of the output.
        include_stop: Whether the text keeps its stop string. None: the value of `no_stop_trim`.
    """
    if max_tokens is not None and (min_tokens or 0) > max_tokens:
        name = SCALAR["min_new_tokens"].names[api]
        raise bad_request(name, f"'{name}' is greater than the most tokens that are allowed.")
    return GenerationParams(
        stream=stream,
        include_usage=include_usage,
        n=body.n or 1,
        seed=seed,
        max_tokens=None if max_tokens is None else max(1, max_tokens),
        sampling=_message_of(body, api, min_tokens, logprobs, vocab_size),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.no_stop_trim) if include_stop is None else include_stop,
        cache_salt=cache_salt,
        priority=priority,
        routing_key=routing_key,
        session=session,
        fields=fields,
        grammar_field=constraint[0] if constraint else None,
        grammar=constraint[1] if constraint else None,
        hidden=max_tokens == 0,
        answer=answer,
    )


def embedding_generation(body: PlacedBody, cache_salt: str, embedding: pb.Embedding, fields: FieldNames) -> GenerationParams:
    """Returns the generation of an embedding vector."""
    return one_step(pb.SamplingParams(embedding=embedding), body.priority, cache_salt, body.routing_key or "", fields)


def score_generation(body: PlacedBody, cache_salt: str, score: pb.Score) -> GenerationParams:
    """Returns the generation of the log probabilities of labels behind the prompt."""
    return one_step(pb.SamplingParams(score=score), body.priority, cache_salt, body.routing_key or "", SCORE)


def _message_of(
    body: SamplingBody,
    api: Api,
    min_tokens: int | None,
    logprobs: pb.Logprobs | None,
    vocab_size: int,
) -> pb.SamplingParams:
    """Returns the parameters that all choices share. A parameter that the client has not given is unset."""
    for row in (STOP_TOKEN_IDS, ALLOWED_TOKEN_IDS, BANNED_TOKEN_IDS):
        check_token_ids(getattr(body, row.names[api]) or (), vocab_size, row.names[api])
    bias = logit_bias(body.logit_bias or {}, vocab_size)
    scalars = {name: getattr(body, name) for name in _SAME_NAMES}
    for row in _POSITIVE:
        if scalars[row.wire] is not None:
            scalars[row.wire] = row.resolved(scalars[row.wire])
    return pb.SamplingParams(
        **scalars,
        min_new_tokens=min_tokens,
        logit_bias_ids=bias.keys(),
        logit_bias_values=bias.values(),
        stop_token_ids=body.stop_token_ids,
        stop=stop_strings(body.stop),
        stop_regex=stop_regexes(body.stop_regex),
        allowed_token_ids=token_id_set(body.allowed_token_ids),
        banned_token_ids=token_id_set(body.banned_token_ids),
        dry=dry(body),
        logprobs=logprobs,
    )
