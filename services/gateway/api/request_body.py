"""Request bodies of every API: JSON parsing, validation errors, and the fields that several APIs share. Pure.

A null in an optional field means the same as no field. Ranges of sampling parameters come from
services/shared/sampling_parameters.py. generation_params.py makes the checks that a type cannot make. Errors have names of
fields, and never a value of a body.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticKnownError

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.api.known_fields import unserved
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.index.prefix_index import cache_namespace
from rootstock_llm.services.shared.sampling_parameters import Api, Kind, of_api

WRITTEN_LEVELS = 254  # maximum depth of nested arrays and objects that orjson.dumps() accepts
MAX_NAME_CHARS = 64  # an error shows this many characters of a name that the client chose
_TYPES = ("bool", "int", "float", "str")  # names of types that pydantic inserts into the locations of its errors
SALT_DIGEST_BYTES = 16  # bytes of the digest that replaces a cache_salt and an extra_key
INT32 = (-(1 << 31), (1 << 31) - 1)
# Maximum characters of a client's request id. The gateway appends the indices of prompt and choice.
RID_CHARS = limits.MAX_REQUEST_ID_CHARS - 8
_UINT32_MAX = (1 << 32) - 1

_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}], "title": "Stop"}
_LISTS = frozenset((Kind.TOKEN_IDS, Kind.STRINGS, Kind.BIASES))

# pydantic accepts any value of the types Stop, Source and Object. Functions check the values, so that an error names the element.
Stop = Annotated[Any, WithJsonSchema(_STOP_SCHEMA)]
Source = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_SWITCH = "Passed to the chat template, which must read a variable of this name."
Object = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]


def load_json(text: bytes | bytearray | str) -> Any:
    """Parses strict JSON: no NaN, no lone surrogates, at most MAX_JSON_DEPTH nested levels.

    The depth limit ensures that orjson can also write the value.

    Raises:
        orjson.JSONDecodeError: The text is not strict JSON.
    """
    value = orjson.loads(text)
    if _opened(text) > limits.MAX_JSON_DEPTH:
        try:
            orjson.dumps(_wrapped(value))
        except orjson.JSONEncodeError:
            raise orjson.JSONDecodeError(f"more than {limits.MAX_JSON_DEPTH} levels", "", 0) from None
    return value


def _opened(text: bytes | bytearray | str) -> int:
    """Returns the number of opening brackets, an upper bound of the nesting. Brackets in strings count too."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _wrapped(value: Any) -> Any:
    """Returns the value wrapped in arrays. orjson can write the result only if the value has at most MAX_JSON_DEPTH levels."""
    for _ in range(WRITTEN_LEVELS - limits.MAX_JSON_DEPTH):
        value = [value]
    return value


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """Returns the JSON object of a request's body. Raises ApiError if the body is not a strict JSON object."""
    wrong = ""
    try:
        value = load_json(body)
    except orjson.JSONDecodeError as error:
        wrong = f"The body is not valid JSON: {error.msg}, at line {error.lineno}, column {error.colno}."
    if wrong:  # raised here, because inside the handler the chained JSONDecodeError would keep the whole body in memory
        raise bad_request(None, wrong, "invalid_json")
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object.", "invalid_json")
    return value


def dump_json(value: Any, param: str) -> bytes:
    """Returns the value as JSON. Raises ApiError, which names the client's field `param`, if the value is nested too deeply."""
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, RecursionError):
        raise bad_request(param, f"'{param}' is nested too deeply.") from None


def arguments_text(given: Any) -> str:
    """Returns the arguments of a tool call as text: a string unchanged, None as "", any other value as JSON."""
    if given is None or isinstance(given, str):
        return given or ""
    return orjson.dumps(given).decode()


def of_validation(error: ValidationError, where: str = "") -> ApiError:
    """Returns the ApiError for the first invalid field. If pydantic has several errors for this field, the deepest location wins.

    Args:
        where: Path of the validated object in the body; "" for the body itself.
    """
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = max((each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]), key=lambda each: len(_location(each)))
    location = [str(part)[:MAX_NAME_CHARS] for part in _location(first)]
    if location[0] == "logit_bias":  # the following parts are token ids that the client chose
        location = location[:1]
    param = ".".join([where, *location] if where else location)
    if first["type"] == "extra_forbidden":
        return unserved(param)
    if first["type"] == "missing":
        return bad_request(param, f"'{param}' is required.", "missing_required_parameter")
    return bad_request(param, f"'{param}': {first['msg']}.")


def _location(error: ErrorDetails) -> list[str | int]:
    """Returns the path of an error in the client's body.

    If a field allows several types, pydantic's location also names the type that failed. The result leaves the type out.
    """
    *above, last = error["loc"]
    names = [part for part in above if not _is_type(part)]
    return names if _is_type(last) and error["type"] != "extra_forbidden" else [*names, last]


def _is_type(part: str | int) -> bool:
    """Returns whether a part of a location is the name of a type. Field names of the API begin with a lower-case letter."""
    return isinstance(part, str) and (part in _TYPES or "[" in part or part[:1].isupper())


def parameter(name: str, api: Api = Api.CHAT, absent: int | None = None) -> Any:
    """Returns the pydantic field of a sampling parameter, with the range from services/shared/sampling_parameters.py.

    Args:
        name: The parameter's name in the API.
        absent: Value of the field if the body does not have it. A null always means None.
    """
    row = of_api(api)[name]
    if row.kind in _LISTS:
        fail_fast = None if row.kind is Kind.BIASES else True  # pydantic 2.11 has no fail_fast for objects
        return Field(absent, min_length=row.least or None, max_length=row.most, fail_fast=fail_fast, description=row.doc)
    if row.kind in (Kind.NUMBER, Kind.INTEGER):
        closed, open_end = (None, row.low) if row.excludes_low else (row.low, None)
        return Field(absent, ge=closed, gt=open_end, le=row.high, description=row.doc)
    return Field(absent, description=row.doc)


def _few_biases(given: Any) -> Any:
    """Refuses too many entries before pydantic makes an error object for each invalid entry."""
    most = limits.MAX_LOGIT_BIAS_ENTRIES
    if isinstance(given, dict) and len(given) > most:
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", "max_length": most, "actual_length": len(given)})
    return given


class SamplingBody(Body):
    """The sampling parameters that have the same name in every API. The names of the DRY parameters are llama.cpp's."""

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
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_biases)] = parameter("logit_bias")
    allowed_token_ids: list[int] | None = parameter("allowed_token_ids")
    banned_token_ids: list[int] | None = parameter("banned_token_ids")
    dry_multiplier: float | None = parameter("dry_multiplier")
    dry_base: float | None = parameter("dry_base")
    dry_allowed_length: int | None = parameter("dry_allowed_length")
    dry_penalty_last_n: int | None = parameter("dry_penalty_last_n")
    dry_sequence_breakers: list[str] | None = parameter("dry_sequence_breakers")


class ThinkingSwitch(Body):
    """A switch of reasoning as an object, as Anthropic's clients send it. Its `budget_tokens` is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class ThinkingBody(Body):
    """The fields that switch reasoning. They are variables of the chat template."""

    enable_thinking: bool | None = Field(None, description=_SWITCH)
    thinking: bool | ThinkingSwitch | None = Field(None, description=f'{_SWITCH} `{{"type": "enabled"}}` means true.')
    think: bool | Literal["low", "medium", "high"] | None = Field(None, description=_SWITCH)


class PlacedBody(Body):
    """The fields for cached prefixes, priority and routing."""

    extra_key: str | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_CACHE_SALT_CHARS,
        description="Only requests with the same extra_key, and with the same cache_salt if it is sent, share cached prefixes.",
    )
    priority: int | None = Field(
        None,
        ge=INT32[0],
        le=INT32[1],
        description="Default: the priority of the API key, or 0. No effect unless priority scheduling is on.",
    )
    routing_key: str | None = Field(
        None,
        max_length=limits.MAX_ROUTING_KEY_CHARS,
        description=(
            "The routing policy `affinity` sends requests with the same routing key to the same worker. The header "
            "x-smg-routing-key has the same effect; the body takes precedence."
        ),
    )


class ConstraintBody(Body):
    """The fields that constrain the output. A request may have at most one. The names are OpenAI's, vLLM's and SGLang's."""

    response_format: Object = Field(None, description="An object with type text, json_object, json_schema or structural_tag.")
    structured_outputs: Object = Field(
        None, description="An object with json, regex, choice, grammar, json_object or structural_tag."
    )
    guided_json: Source = Field(None, description="A JSON Schema, as an object or as text.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_GUIDED_CHOICES,
        description="The output equals one of these texts.",
    )
    guided_grammar: str | None = Field(None, description="EBNF.")
    json_schema: Source = Field(None, description="The same as guided_json.")
    regex: str | None = Field(None, description="The same as guided_regex.")
    ebnf: str | None = Field(None, description="The same as guided_grammar.")
    structural_tag: Source = Field(None, description="Tags, and the structure of the output that follows each tag.")


class SessionParams(Body):
    """The session of a request, and the earlier turn that the request continues."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(None, min_length=1, max_length=limits.MAX_SESSION_ID_CHARS)
    rid: str | None = Field(
        None,
        max_length=limits.MAX_REQUEST_ID_CHARS,
        description="Request id of the turn that this request continues. Null: the latest turn.",
    )
    offset: int | None = Field(
        None, ge=-1, le=_UINT32_MAX, description="Number of tokens of the continued turn's context to keep. Null or -1: all."
    )
    replace: bool | None = Field(None, description="Whether turns after the continued turn are deleted.")
    drop_previous_output: bool | None = Field(None, description="Whether the continued turn's output is left out of the context.")


def session_turn(given: SessionParams | None) -> worker_pb2.SessionTurn | None:
    if given is None or given.id is None:
        return None
    return worker_pb2.SessionTurn(
        session_id=given.id,
        parent_request_id=given.rid or "",
        offset=None if given.offset in (None, -1) else given.offset,
        replace=bool(given.replace),
        drop_previous_output=bool(given.drop_previous_output),
    )


def starts_context(given: SessionParams | None) -> bool:
    """Returns whether a prompt starts a context, so that the tokenizer adds a beginning-of-sequence token.

    A turn that names an earlier turn continues the context of the earlier turn, unless `offset` is 0.
    """
    return given is None or not given.rid or given.offset == 0


def check_turn(alone: bool, prompt_logprobs: str | None) -> None:
    """Checks that a turn of a session asks only for features that sessions support. Raises ApiError.

    Args:
        alone: Whether the request has exactly one prompt and one output.
        prompt_logprobs: The client's field that asks for log probabilities of the prompt, or None if none does.
    """
    if not alone:
        raise bad_request("session_params", "A turn of a session must have one prompt and one output. Send one prompt, and n 1.")
    if prompt_logprobs is not None:
        raise bad_request(prompt_logprobs, "Log probabilities of the prompt are not supported in a session.")


def joined_salt(cache_salt: str | None, extra_key: str | None) -> str:
    """Returns the cache salt that workers receive for vLLM's `cache_salt` and SGLang's `extra_key`.

    If the client sent one of these fields, its value is the salt. If the client sent both fields, the salt is a digest of both.
    """
    if not cache_salt or not extra_key:
        return cache_salt or extra_key or ""
    return blake2b(cache_namespace(cache_salt, extra_key).encode(), digest_size=SALT_DIGEST_BYTES).hexdigest()
