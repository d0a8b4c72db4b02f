"""Translates the parameters of a request of any API into GenerationParams, with the SamplingParams message for workers.

The functions make the checks that pydantic types cannot make. Pure. The message of an ApiError has the field's name in the
client's API, and never a value that the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.api.constraints import Named
from rootstock_llm.services.gateway.api.request_body import PlacedBody, SamplingBody
from rootstock_llm.services.gateway.generation.body_fields import SCORE, TEXT_ALONE, AnswerBody, FieldNames
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.gateway.generation.request import GenerationParams, one_step
from rootstock_llm.services.shared.sampling_parameters import (
    ALLOWED_TOKEN_IDS,
    BANNED_TOKEN_IDS,
    DRY_SEQUENCE_BREAKERS,
    LOGIT_BIAS,
    SCALAR,
    SCALARS,
    STOP,
    STOP_REGEX,
    STOP_TOKEN_IDS,
    Api,
    SamplingParameter,
    spelled,
)

# Parameters with the same name in every API.
_SAME_NAMES = tuple(row.wire for row in SCALARS if set(row.names.values()) == {row.wire})
# Parameters that must be above 0. A tiny value must not become 0 when it is converted to float32.
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
    """Returns the parameters for each prompt of a request. Raises ApiError.

    Args:
        api: API whose names `body` and the errors use.
        max_tokens: Maximum number of output tokens. None for as many as the context allows. 0 for no output; only some APIs
            accept 0.
        constraint: The client's field, and the grammar of the output. None for any output.
        include_stop: Whether the text keeps its stop string. None for the value of `no_stop_trim`.
    """
    if max_tokens is not None and (min_tokens or 0) > max_tokens:
        name = SCALAR["min_new_tokens"].names[api]
        raise bad_request(name, f"'{name}' must not exceed the maximum number of output tokens.")
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
    """Returns the parameters of a request for an embedding."""
    return one_step(pb.SamplingParams(embedding=embedding), body.priority, cache_salt, body.routing_key or "", fields)


def score_generation(body: PlacedBody, cache_salt: str, score: pb.Score) -> GenerationParams:
    """Returns the parameters of a request for the log probabilities of labels as the next token."""
    return one_step(pb.SamplingParams(score=score), body.priority, cache_salt, body.routing_key or "", SCORE)


def _message_of(
    body: SamplingBody,
    api: Api,
    min_tokens: int | None,
    logprobs: pb.Logprobs | None,
    vocab_size: int,
) -> pb.SamplingParams:
    """Returns the sampling message that all choices share. Parameters that the client did not send are unset."""
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


def stop_strings(value: Any, name: str = STOP.wire) -> list[str]:
    """Returns the checked stop strings of the client's field `name`. Raises ApiError."""
    return _texts(value, STOP, name)


def stop_regexes(value: Any) -> list[str]:
    """Returns the stop patterns. Raises ApiError for a wrong type, number or length. Workers refuse invalid patterns."""
    return _texts(value, STOP_REGEX, STOP_REGEX.wire)


def _texts(value: Any, row: SamplingParameter, name: str) -> list[str]:
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > row.most:
        raise bad_request(name, f"'{name}' may have at most {row.most} strings.")
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise bad_request(name, f"'{name}' must be a string or a list of strings.")
    if any(not 1 <= len(item) <= row.chars for item in texts):
        raise bad_request(name, f"A string of '{name}' must have 1 to {row.chars} characters.")
    return texts


def logit_bias(entries: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    row = LOGIT_BIAS
    bias: dict[int, float] = {}
    for key, value in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request("logit_bias", "The member names of 'logit_bias' must be token ids.")
        if row.fault(value):
            raise bad_request("logit_bias", f"The values of 'logit_bias' must be {spelled(row.low, row.high)}.")
        bias[int(key)] = value
    check_token_ids(list(bias), vocab_size, "logit_bias")
    return bias


def dry(body: SamplingBody) -> pb.Dry | None:
    """Returns the DRY penalty, or None if it is off."""
    for breaker in body.dry_sequence_breakers or ():
        if not 1 <= len(breaker) <= DRY_SEQUENCE_BREAKERS.chars:
            message = f"A text of 'dry_sequence_breakers' must have 1 to {DRY_SEQUENCE_BREAKERS.chars} characters."
            raise bad_request("dry_sequence_breakers", message)
    if not body.dry_multiplier or body.dry_penalty_last_n == 0:
        return None
    last = body.dry_penalty_last_n
    return pb.Dry(
        multiplier=body.dry_multiplier,
        base=body.dry_base,
        allowed_length=body.dry_allowed_length,
        window=None if last == -1 else last,
        breakers=body.dry_sequence_breakers,
    )


def token_id_set(ids: Sequence[int] | None) -> list[int]:
    """Returns the distinct ids in ascending order."""
    return sorted(set(ids or ()))


def check_token_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Checks that all ids are integers below `vocab_size`. Raises ApiError.

    Has no Python loop, because prompts may have millions of ids.
    """
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        raise bad_request(param, f"'{param}' must have integers only.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise bad_request(param, f"'{param}' has a token id outside the vocabulary (0 to {vocab_size - 1}).")
