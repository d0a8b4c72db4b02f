"""The base class of request bodies, and the names of fields in errors.

A worker names a refused field by the field's path in the protobuf messages, such as `max_new_tokens`. The gateway names a field
of a chat by the field's path in ChatRequest, such as `messages`. The table of an API maps these paths to the API's own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rootstock_llm.services.shared.sampling_parameters import Api, renamed


class Body(BaseModel):
    """The base of all request bodies. Ignores unknown fields, because clients send new fields. A subclass may forbid them."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        """Converts 5.0 to 5 in integer fields, because JSON has no integers and some clients write 5.0."""
        if not isinstance(given, dict):
            return given
        whole = {
            name: int(value)
            for name, value in given.items()
            if type(value) is float and value.is_integer() and abs(value) < _EXACT
        }
        integers = _integers(cls)
        return {**given, **{name: value for name, value in whole.items() if name in integers}} if whole else given

    @model_validator(mode="before")
    @classmethod
    def _without_more_unknown(cls, given: Any) -> Any:
        """Removes all unknown fields but the first, if unknown fields are forbidden.

        pydantic makes an error object for each forbidden field. The response names only the first field.
        """
        if cls.model_config.get("extra") != "forbid" or not isinstance(given, dict):
            return given
        unknown = given.keys() - cls.model_fields.keys()
        if len(unknown) <= 1:
            return given
        unknown.remove(next(name for name in given if name in unknown))
        return {name: value for name, value in given.items() if name not in unknown}


_EXACT = 1 << 53  # smaller integers are exact as doubles


@cache
def _integers(body: type[BaseModel]) -> frozenset[str]:
    """Returns the names of the integer fields of a body."""
    return frozenset(name for name, field in body.model_fields.items() if field.annotation in (int, int | None))


class AnswerBody(Body):
    """The request's fields that add optional fields to the response. Only renderers read them; workers do not receive them."""

    return_token_ids: bool | None = Field(
        default=None, description="Whether choices have `token_ids`, and the response `prompt_token_ids`."
    )

    def shown(self) -> AnswerBody:
        """Returns the fields of AnswerBody without the other fields of a subclass. Returns TEXT_ALONE if all are unset."""
        given = {name: value for name in _SHOWN if (value := getattr(self, name)) is not None}
        return AnswerBody(**given) if given else TEXT_ALONE


_SHOWN = tuple(AnswerBody.model_fields)
TEXT_ALONE = AnswerBody()


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Maps the internal paths of fields to one API's field names, for errors."""

    names: Mapping[str, str] = field(default_factory=dict)  # client's name by path, or by the first part of the path
    prefix: str = ""  # path of the object with the sampling parameters, for fields not in `names`; "" for the body itself

    def of(self, path: str) -> str:
        """Returns the API's name for a path: the entry in `names`, or else `prefix` and the path."""
        for known in (path, path.partition(".")[0], path.partition("[")[0]):
            if known in self.names:
                return self.names[known]
        return f"{self.prefix}.{path}" if self.prefix else path

    def within(self, prefix: str, prompt: str) -> FieldNames:
        """Returns a copy with this prefix, in which the argument `prompt` is the name of the prompt's field."""
        return replace(self, prefix=prefix, names={**self.names, "prompt_ids": prompt})


NO_NAMES = FieldNames()  # for APIs whose names equal the paths
_SESSION = {
    "session": "session_params",
    "session.session_id": "session_params.id",
    "session.parent_request_id": "session_params.rid",
    "session.offset": "session_params.offset",
}
_OPENAI = {
    **_SESSION,
    **renamed(Api.CHAT),
    "request_id": "rid",
    "dry": "dry_multiplier",
    "logprobs.token_ids": "logprob_token_ids",
}
CHAT = FieldNames({**_OPENAI, "prompt_ids": "messages", "prediction_ids": "prediction", "logprobs.top": "top_logprobs"})
MESSAGES = FieldNames(
    {**CHAT.names, "messages": "messages", "reasoning_effort": "output_config.effort", "stop": "stop_sequences"}
)
RESPONSES = FieldNames(
    {
        **CHAT.names,
        "messages": "input",
        "prompt_ids": "input",
        "reasoning_effort": "reasoning.effort",
        "max_new_tokens": "max_output_tokens",
        "logprobs": "include",
    }
)
COMPLETION = FieldNames({**_OPENAI, "prompt_ids": "prompt", "logprobs": "logprobs", "logprobs.prompt_from": "echo"})
_VECTOR = {"embedding.dimensions": "dimensions", "embedding.normalize": "normalize", "embedding": "model"}
EMBEDDING = FieldNames({**_VECTOR, "prompt_ids": "input", "request_id": "rid"})
GENERATE = FieldNames(
    {
        **_SESSION,
        "logprobs": "return_logprob",
        "logprobs.top": "top_logprobs_num",
        "logprobs.token_ids": "token_ids_logprob",
        "logprobs.prompt_from": "logprob_start_len",
        "routed_experts_from": "routed_experts_start_len",
        "cache_salt": "extra_key",
        "priority": "priority",
        "routing_key": "routing_key",
        "request_id": "rid",
        **{wire: f"sampling_params.{name}" for wire, name in renamed(Api.GENERATE).items()},
    }
)
ENCODE = FieldNames({**_VECTOR, "cache_salt": "extra_key", "request_id": "rid"})
SCORE = FieldNames({"score": "label_token_ids", "cache_salt": "extra_key", "request_id": "rid", "prompt_ids": "items"})
