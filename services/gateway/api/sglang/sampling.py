"""SGLang's names for what is asked of one prompt → Generation, or an ApiError that names the field. Pure.

Error messages never repeat what the client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.api import constraints
from services.gateway.api.body_errors import of_validation
from services.gateway.api.sampling_fields import check_token_ids, dry, logit_bias, stop_regexes, stop_strings, token_id_set
from services.gateway.api.sglang.types import NativeSampling
from services.gateway.request import client_fields
from services.gateway.request.errors import ApiError, bad_request
from services.gateway.request.generation import Generation
from services.gateway.sglang_neutral import without_neutral

ANY_JSON = "$$ANY$$"  # as a json_schema: any JSON object

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """Which log probabilities one prompt's answers carry. start: first prompt position that is listed, -1 for none. SGLang
    lists that position without a value, wherever it is, so that the values are those of what follows it."""

    top: int = 0
    token_ids: tuple[int, ...] = ()
    start: int = -1


@dataclass(frozen=True, slots=True)
class Common:
    """What all prompts of one call share."""

    stream: bool
    cache_salt: str
    priority: int
    routing_key: str
    session: worker_pb2.SessionTurn | None


def parse(model: type[M], value: Any, where: str = "") -> M:
    """Raises ApiError. `where` is the field that holds the value, "" for the body itself."""
    if not isinstance(value, dict):
        raise bad_request(where or None, f"'{where}' must be an object.")
    try:
        return model.model_validate(without_neutral(value, model.model_fields.keys()))
    except ValidationError as error:
        raise of_validation(error, where) from None


def generation_of(
    given: NativeSampling, wish: LogprobWish | None, common: Common, vocab_size: int, where: str, prompt_field: str
) -> Generation:
    """where, prompt_field: the paths of the sampling parameters and of the prompt, for errors."""
    try:
        generation = _generation(given, wish, common, vocab_size, where)
        return replace(generation, fields=client_fields.GENERATE.within(where, prompt_field))
    except ApiError as error:
        error.param = f"{where}.{error.param}"
        raise


def _generation(given: NativeSampling, wish: LogprobWish | None, common: Common, vocab_size: int, where: str) -> Generation:
    max_tokens = given.max_new_tokens
    if max_tokens is not None and (given.min_new_tokens or 0) > max_tokens:
        raise bad_request("min_new_tokens", "'min_new_tokens' is greater than 'max_new_tokens'.")
    if given.spaces_between_special_tokens is False:
        raise ApiError(
            400,
            "'spaces_between_special_tokens' can only be true.",
            param="spaces_between_special_tokens",
            code="unsupported_parameter",
        )
    for name in _ID_LISTS:
        check_token_ids(getattr(given, name) or (), vocab_size, name)
    constraint = constraints.only_one(
        [(name, maker(value, name)) for name, maker in _GRAMMARS.items() if (value := getattr(given, name)) is not None]
    )
    return Generation(
        stream=common.stream,
        include_usage=False,
        n=given.n or 1,
        seed=given.sampling_seed,
        max_tokens=None if max_tokens is None else max(1, max_tokens),
        sampling=_sampling(given, wish, constraint[1] if constraint else None, vocab_size),
        stop_token_ids=frozenset(given.stop_token_ids or ()),
        skip_special_tokens=given.skip_special_tokens is not False,
        include_stop=bool(given.no_stop_trim),
        return_token_ids=True,
        cache_salt=common.cache_salt,
        priority=common.priority,
        routing_key=common.routing_key,
        session=common.session,
        grammar_field=f"{where}.{constraint[0]}" if constraint else None,
        stream_repeats=common.stream,
    )


def _json_schema(value: Any, where: str) -> pb.Grammar:
    return pb.Grammar(json_object=True) if value == ANY_JSON else constraints.json_schema(value, where)


_GRAMMARS: Mapping[str, Callable[[Any, str], pb.Grammar]] = {
    "json_schema": _json_schema,
    "regex": constraints.regex,
    "ebnf": constraints.ebnf,
    "structural_tag": constraints.structural_tag,
}
_ID_LISTS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")


def embedding_generation(common: Common, dimensions: int | None, prompt_field: str) -> Generation:
    return Generation(
        stream=False,
        include_usage=False,
        n=1,
        seed=None,
        max_tokens=1,
        sampling=pb.SamplingParams(embedding=pb.Embedding(dimensions=dimensions)),
        stop_token_ids=frozenset(),
        skip_special_tokens=True,
        include_stop=False,
        return_token_ids=False,
        cache_salt=common.cache_salt,
        priority=common.priority,
        routing_key=common.routing_key,
        fields=client_fields.ENCODE.within("", prompt_field),
    )


def _sampling(given: NativeSampling, wish: LogprobWish | None, grammar: pb.Grammar | None, vocab_size: int) -> pb.SamplingParams:
    bias = logit_bias(given.logit_bias or {}, vocab_size)
    return pb.SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
        min_new_tokens=given.min_new_tokens,
        ignore_eos=given.ignore_eos,
        skip_special_tokens=given.skip_special_tokens,
        stream_interval=given.stream_interval,
        logit_bias_ids=bias.keys(),
        logit_bias_values=bias.values(),
        allowed_token_ids=token_id_set(given.allowed_token_ids),
        banned_token_ids=token_id_set(given.banned_token_ids),
        dry=dry(given),
        stop_token_ids=given.stop_token_ids,
        stop=stop_strings(given.stop),
        stop_regex=stop_regexes(given.stop_regex),
        logprobs=None if wish is None else _logprobs(wish),
        grammar=grammar,
    )


def _logprobs(wish: LogprobWish) -> pb.Logprobs:
    return pb.Logprobs(top=wish.top, token_ids=wish.token_ids, prompt_from=None if wish.start < 0 else wish.start)
