"""Translates the parameters of one /generate prompt into a GenerationParams. Pure. An ApiError names the invalid field.

Error messages never repeat a value that the client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.api import constraints
from rootstock_llm.services.gateway.api.generation_params import generation_of
from rootstock_llm.services.gateway.api.known_fields import NATIVE, KnownFields, without_neutral
from rootstock_llm.services.gateway.api.request_body import of_validation, session_turn
from rootstock_llm.services.gateway.api.sglang.types import NativeGenerateRequest, NativeSampling
from rootstock_llm.services.gateway.generation.body_fields import GENERATE, AnswerBody
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.request import GenerationParams
from rootstock_llm.services.shared.sampling_parameters import Api

ANY_JSON = "$$ANY$$"  # value of json_schema that means any JSON object

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class LogprobSettings:
    """The log probabilities that the client wants for one prompt and its outputs.

    As in SGLang, the first listed token of the prompt has no value.
    """

    top: int = 0  # number of most likely tokens that are listed for each token
    token_ids: tuple[int, ...] = ()  # ids whose log probabilities are listed for each token
    start: int = -1  # index of the first listed prompt token; -1 for no prompt tokens

    def message(self) -> pb.Logprobs:
        return pb.Logprobs(top=self.top, token_ids=self.token_ids, prompt_from=None if self.start < 0 else self.start)


def parse(model: type[M], value: Any, where: str = "", known: KnownFields = NATIVE) -> M:
    """Returns the validated value. Raises ApiError.

    Args:
        where: Path of the value in the client's body; "" for the body itself.
        known: Fields of the value that have no effect.
    """
    if not isinstance(value, dict):
        raise bad_request(where or None, f"'{where}' must be an object.")
    try:
        return model.model_validate(without_neutral(value, model.model_fields.keys(), known))
    except ValidationError as error:
        raise of_validation(error, where) from None


def native_generation(
    given: NativeSampling,
    logprobs: LogprobSettings | None,
    request: NativeGenerateRequest,
    vocab_size: int,
    where: str,
    prompt_field: str,
) -> GenerationParams:
    """Returns the generation parameters of one prompt. Raises ApiError.

    Args:
        where: Path of the sampling parameters in the client's body.
        prompt_field: The client's field of the prompts.
    """
    try:
        generation = generation_of(
            given,
            Api.GENERATE,
            vocab_size,
            GENERATE.within(where, prompt_field),
            max_tokens=given.max_new_tokens,
            min_tokens=given.min_new_tokens,
            seed=given.sampling_seed,
            logprobs=None if logprobs is None else logprobs.message(),
            constraint=_constraint(given),
            stream=bool(request.stream),
            answer=AnswerBody(return_token_ids=True),
            cache_salt=request.extra_key or "",
            priority=request.priority,
            routing_key=request.routing_key or "",
            session=session_turn(request.session_params),
        )
    except ApiError as error:
        error.param = f"{where}.{error.param}"
        raise
    return replace(
        generation,
        stream_repeats=generation.stream,
        grammar_field=f"{where}.{generation.grammar_field}" if generation.grammar_field else None,
    )


def _constraint(given: NativeSampling) -> constraints.Named | None:
    found = [(name, maker(value, name)) for name, maker in _GRAMMARS.items() if (value := getattr(given, name)) is not None]
    return constraints.only_one(found)


def _json_schema(value: Any, where: str) -> pb.Grammar:
    return pb.Grammar(json_object=True) if value == ANY_JSON else constraints.json_schema(value, where)


_GRAMMARS: Mapping[str, Callable[[Any, str], pb.Grammar]] = {
    "json_schema": _json_schema,
    "regex": constraints.regex,
    "ebnf": constraints.ebnf,
    "structural_tag": constraints.structural_tag,
}
