"""Fields that the bodies of several APIs share, for validation and documentation.

Every optional field accepts null as "not given". Ranges of sampling parameters come from their table. sampling_fields.py makes
the checks that a type cannot make.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from services.gateway.request.bodies import Body
from services.shared import limits
from services.shared.index.cache_namespace import cache_namespace
from services.shared.sampling_parameters import Api, Kind, of_api

SALT_DIGEST_BYTES = 16
INT32 = (-(1 << 31), (1 << 31) - 1)
RID_CHARS = limits.MAX_REQUEST_ID_CHARS - 8  # a prompt's and a choice's number are added to it on the way to the worker

_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}], "title": "Stop"}
_LISTS = frozenset((Kind.TOKEN_IDS, Kind.STRINGS, Kind.BIASES))

# Checked by hand: the answer names the exact element.
Stop = Annotated[Any, WithJsonSchema(_STOP_SCHEMA)]
Source = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_SWITCH = "Given to the chat template, which has to read a variable of this name."
Object = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]


def parameter(name: str, api: Api = Api.CHAT, absent: int | None = None) -> Any:
    """Returns the pydantic field of a sampling parameter, with the range of its table.

    Args:
        name: The API's name of the parameter.
        absent: Value if the body does not have the field. null always means None.
    """
    row = of_api(api)[name]
    if row.kind in _LISTS:
        return Field(absent, min_length=row.least or None, max_length=row.most, description=row.doc)
    if row.kind in (Kind.NUMBER, Kind.INTEGER):
        closed, open_end = (None, row.low) if row.excludes_low else (row.low, None)
        return Field(absent, ge=closed, gt=open_end, le=row.high, description=row.doc)
    return Field(absent, description=row.doc)


class SamplingBody(Body):
    """The sampling parameters that have the same name in every API. DRY has llama.cpp's names."""

    n: int | None = parameter("n")
    temperature: float | None = parameter("temperature")
    top_p: float | None = parameter("top_p")
    top_k: int | None = parameter("top_k")
    min_p: float | None = parameter("min_p")
    top_n_sigma: float | None = parameter("top_n_sigma")
    repetition_penalty: float | None = parameter("repetition_penalty")
    frequency_penalty: float | None = parameter("frequency_penalty")
    presence_penalty: float | None = parameter("presence_penalty")
    ignore_eos: bool | None = parameter("ignore_eos")
    skip_special_tokens: bool | None = parameter("skip_special_tokens")
    speculative: bool | None = parameter("speculative")
    stream_interval: int | None = parameter("stream_interval")
    stop: Stop = parameter("stop")
    stop_regex: Stop = parameter("stop_regex")
    stop_token_ids: list[int] | None = parameter("stop_token_ids")
    no_stop_trim: bool | None = parameter("no_stop_trim")
    logit_bias: dict[str, float] | None = parameter("logit_bias")
    allowed_token_ids: list[int] | None = parameter("allowed_token_ids")
    banned_token_ids: list[int] | None = parameter("banned_token_ids")
    dry_multiplier: float | None = parameter("dry_multiplier")
    dry_base: float | None = parameter("dry_base")
    dry_allowed_length: int | None = parameter("dry_allowed_length")
    dry_penalty_last_n: int | None = parameter("dry_penalty_last_n")
    dry_sequence_breakers: list[str] | None = parameter("dry_sequence_breakers")


class ThinkingSwitch(Body):
    """A switch of reasoning in the form of other APIs. A budget of tokens is not supported."""

    type: Literal["enabled", "disabled", "adaptive"]


class ThinkingBody(Body):
    """Switches of reasoning, which are variables of chat templates."""

    enable_thinking: bool | None = Field(None, description=_SWITCH)
    thinking: bool | ThinkingSwitch | None = Field(None, description=f'{_SWITCH} `{{"type": "enabled"}}` means true.')
    think: bool | Literal["low", "medium", "high"] | None = Field(None, description=_SWITCH)


class PlacedBody(Body):
    """The sharing of cached prefixes, and the request's priority."""

    extra_key: str | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_CACHE_SALT_CHARS,
        description=(
            "Cached prefixes are shared only within an extra key. With a cache_salt, both together are a separate namespace."
        ),
    )
    priority: int | None = Field(None, ge=INT32[0], le=INT32[1], description="Default 0. Without priority scheduling: no effect.")
    routing_key: str | None = Field(
        None,
        max_length=limits.MAX_ROUTING_KEY_CHARS,
        description=(
            "The policy affinity sends requests with the same routing key to the same worker. The header "
            "x-smg-routing-key sets it, too; the body takes precedence."
        ),
    )


class ConstraintBody(Body):
    """Constraints of the output, of which at most one may be given. The names are OpenAI's, vLLM's and SGLang's."""

    response_format: Object = Field(None, description="text, json_object, json_schema or structural_tag.")
    structured_outputs: Object = Field(
        None, description="An object with json, regex, choice, grammar, json_object or structural_tag."
    )
    guided_json: Source = Field(None, description="A JSON Schema, as an object or as text.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_GUIDED_CHOICES,
        description="Allowed outputs. The output equals one text of the list.",
    )
    guided_grammar: str | None = Field(None, description="EBNF.")
    json_schema: Source = Field(None, description="The same as guided_json.")
    regex: str | None = Field(None, description="The same as guided_regex.")
    ebnf: str | None = Field(None, description="The same as guided_grammar.")
    structural_tag: Source = Field(None, description="Tags, and the structure of the output after each of them.")


def joined_salt(cache_salt: str | None, extra_key: str | None) -> str:
    """Returns the one salt that workers get for vLLM's `cache_salt` and SGLang's `extra_key`.

    Each alone is the salt, by either name. Both together are a separate namespace.
    """
    if not cache_salt or not extra_key:
        return cache_salt or extra_key or ""
    return blake2b(cache_namespace(cache_salt, extra_key).encode(), digest_size=SALT_DIGEST_BYTES).hexdigest()
