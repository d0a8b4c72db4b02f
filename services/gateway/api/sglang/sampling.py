"""SGLang's names for what is asked of one prompt → Generation, or an ApiError that names the field. Pure.

Error messages never repeat what the client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rootstock.v1 import common_pb2 as pb
from services.gateway.api import constraints
from services.gateway.api.body_errors import of_validation
from services.gateway.api.known_fields import NATIVE, KnownFields, without_neutral
from services.gateway.api.sglang.types import NativeSampling
from services.gateway.api.translation import Common, Wanted, generation_of
from services.gateway.request import client_fields
from services.gateway.request.bodies import AnswerBody
from services.gateway.request.errors import ApiError, bad_request
from services.gateway.request.generation import Generation
from services.shared.sampling_parameters import Api

ANY_JSON = "$$ANY$$"  # as a json_schema: any JSON object

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """Which log probabilities one prompt's answers carry. start: first prompt position that is listed, -1 for none. SGLang
    lists that position without a value, wherever it is, so that the values are those of what follows it."""

    top: int = 0
    token_ids: tuple[int, ...] = ()
    start: int = -1

    def message(self) -> pb.Logprobs:
        return pb.Logprobs(top=self.top, token_ids=self.token_ids, prompt_from=None if self.start < 0 else self.start)


def parse(model: type[M], value: Any, where: str = "", known: KnownFields = NATIVE) -> M:
    """Raises ApiError. `where` is the field that holds the value, "" for the body itself."""
    if not isinstance(value, dict):
        raise bad_request(where or None, f"'{where}' must be an object.")
    try:
        return model.model_validate(without_neutral(value, model.model_fields.keys(), known))
    except ValidationError as error:
        raise of_validation(error, where) from None


def native_generation(
    given: NativeSampling, wish: LogprobWish | None, common: Common, vocab_size: int, where: str, prompt_field: str
) -> Generation:
    """where, prompt_field: the paths of the sampling parameters and of the prompt, for errors."""
    try:
        wanted = Wanted(given.max_new_tokens, None if wish is None else wish.message(), _constraint(given))
        generation = generation_of(given, Api.GENERATE, common, wanted, vocab_size)
    except ApiError as error:
        error.param = f"{where}.{error.param}"
        raise
    return replace(
        generation,
        answer=AnswerBody(return_token_ids=True),
        stream_repeats=common.stream,
        grammar_field=f"{where}.{generation.grammar_field}" if generation.grammar_field else None,
        fields=client_fields.GENERATE.within(where, prompt_field),
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
