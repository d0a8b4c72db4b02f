"""What a checked body of any API asks for → Generation, with the parameters as workers are told them. Pure; raises ApiError.

Errors name the API's own field; their messages never repeat what the client sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.api.constraints import Named
from services.gateway.api.request_body import PlacedBody, SamplingBody
from services.gateway.api.sampling_fields import check_token_ids, dry, logit_bias, stop_regexes, stop_strings, token_id_set
from services.gateway.request import client_fields
from services.gateway.request.bodies import TEXT_ALONE, AnswerBody
from services.gateway.request.client_fields import NO_FIELDS, ClientFields
from services.gateway.request.errors import bad_request
from services.gateway.request.generation import Generation, one_step
from services.shared.sampling_parameters import (
    ALLOWED_TOKEN_IDS,
    BANNED_TOKEN_IDS,
    SCALAR,
    SCALARS,
    SEED,
    STOP_TOKEN_IDS,
    Api,
    SamplingParameter,
)

_SCALAR_NAMES = {api: tuple((row.wire, row.names[api]) for row in SCALARS) for api in Api}
_POSITIVE = tuple(row for row in SCALARS if row.excludes_low)


@dataclass(frozen=True, slots=True)
class Common:
    """What all prompts of one call share."""

    stream: bool
    cache_salt: str
    priority: int | None
    routing_key: str
    session: worker_pb2.SessionTurn | None

    @classmethod
    def of(cls, body: PlacedBody, cache_salt: str, stream: bool = False, session: worker_pb2.SessionTurn | None = None) -> Common:
        return cls(stream, cache_salt, body.priority, body.routing_key or "", session)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters that each API reads from a form of its own."""

    max_tokens: int | None  # None: as many as the context leaves; 0: no token, which only some APIs take
    logprobs: pb.Logprobs | None
    constraint: Named | None  # the client's field, and the grammar of the output
    include_usage: bool = False  # the last event of a stream has the usage
    include_stop: bool | None = None  # the text ends with the stop string; None: as `no_stop_trim` says
    answer: AnswerBody = TEXT_ALONE
    fields: ClientFields = NO_FIELDS


def generation_of(body: SamplingBody, api: Api, common: Common, wanted: Wanted, vocab_size: int) -> Generation:
    """The rest of it is the API's to fill in."""
    most, least = wanted.max_tokens, _given(body, api, SCALAR["min_new_tokens"])
    if most is not None and (least or 0) > most:
        name = SCALAR["min_new_tokens"].names[api]
        raise bad_request(name, f"'{name}' is greater than the most tokens that are allowed.")
    return Generation(
        stream=common.stream,
        include_usage=wanted.include_usage,
        n=body.n or 1,
        seed=_given(body, api, SEED),
        max_tokens=None if most is None else max(1, most),
        sampling=_message_of(body, api, wanted, vocab_size),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.no_stop_trim) if wanted.include_stop is None else wanted.include_stop,
        cache_salt=common.cache_salt,
        priority=common.priority,
        routing_key=common.routing_key,
        session=common.session,
        fields=wanted.fields,
        grammar_field=wanted.constraint[0] if wanted.constraint else None,
        hidden=most == 0,
        answer=wanted.answer,
    )


def embedding_generation(common: Common, embedding: pb.Embedding, fields: ClientFields) -> Generation:
    """A vector in place of text."""
    return one_step(pb.SamplingParams(embedding=embedding), common.priority, common.cache_salt, common.routing_key, fields)


def score_generation(common: Common, score: pb.Score) -> Generation:
    """Log probabilities of labels behind the prompt in place of text."""
    fields = client_fields.SCORE
    return one_step(pb.SamplingParams(score=score), common.priority, common.cache_salt, common.routing_key, fields)


def _given(body: SamplingBody, api: Api, row: SamplingParameter) -> Any:
    return getattr(body, row.names[api])


def _message_of(body: SamplingBody, api: Api, wanted: Wanted, vocab_size: int) -> pb.SamplingParams:
    """Without max_new_tokens and seed, which differ by prompt and choice; what the client has not said is unset."""
    for row in (STOP_TOKEN_IDS, ALLOWED_TOKEN_IDS, BANNED_TOKEN_IDS):
        check_token_ids(_given(body, api, row) or (), vocab_size, row.names[api])
    bias = logit_bias(body.logit_bias or {}, vocab_size)
    scalars = {wire: getattr(body, name) for wire, name in _SCALAR_NAMES[api]}
    for row in _POSITIVE:
        if scalars[row.wire] is not None:
            scalars[row.wire] = row.resolved(scalars[row.wire])
    return pb.SamplingParams(
        **scalars,
        logit_bias_ids=bias.keys(),
        logit_bias_values=bias.values(),
        stop_token_ids=body.stop_token_ids,
        stop=stop_strings(body.stop),
        stop_regex=stop_regexes(body.stop_regex),
        allowed_token_ids=token_id_set(body.allowed_token_ids),
        banned_token_ids=token_id_set(body.banned_token_ids),
        dry=dry(body),
        logprobs=wanted.logprobs,
        grammar=wanted.constraint[1] if wanted.constraint else None,
    )
