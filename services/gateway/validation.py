"""A request's body → Generation, or an ApiError that names the field. Pure: no I/O, nothing is allocated anywhere.

Error messages never repeat what the client sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from rootstock.v1 import common_pb2 as pb
from services.gateway.errors import ApiError, bad_request, context_length_exceeded
from services.gateway.openai_types import ChatCompletionRequest, CompletionRequest, GenerationBody
from services.shared import limits
from services.shared.log import fields

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16
_UINT64_MASK = (1 << 64) - 1

# Fields that change the answer and are not built yet, and the values of them that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "structural_tag": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "lora_path": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True,),
    "chat_template": (),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "return_hidden_states": (False,),
}

B = TypeVar("B", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the gateway knows of the model that its workers serve. Lengths in tokens."""

    name: str
    context_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A valid request, whatever its endpoint. `sampling` lacks max_new_tokens and seed: they differ by prompt and choice."""

    stream: bool
    include_usage: bool
    n: int
    seed: int | None
    max_tokens: int | None  # None: up to the context
    sampling: pb.SamplingParams
    stop_token_ids: frozenset[int]
    skip_special_tokens: bool
    include_stop: bool
    return_token_ids: bool
    cache_salt: str
    priority: int

    def sampling_of(self, choice: int, prompt_tokens: int, context_len: int) -> pb.SamplingParams:
        """The parameters of one choice: `choice` counts from 0 within its prompt."""
        params = pb.SamplingParams()
        params.CopyFrom(self.sampling)
        room = context_len - prompt_tokens
        params.max_new_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        if self.seed is not None:
            params.seed = (self.seed + choice) & _UINT64_MASK
        return params


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


def parse_chat(body: dict[str, Any]) -> ChatCompletionRequest:
    return _parse(ChatCompletionRequest, body)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    return _parse(CompletionRequest, body)


def _parse(model: type[B], body: dict[str, Any]) -> B:
    _refuse_unsupported(body)
    if logger.isEnabledFor(logging.DEBUG):
        unknown = body.keys() - model.model_fields.keys() - _UNSUPPORTED.keys()
        if unknown:
            logger.debug("ignored unknown fields", extra=fields(names=sorted(name[:64] for name in unknown)))
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _translate(error) from None


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name in _UNSUPPORTED.keys() & body.keys():
        value = body[name]
        # `is` first: False == 0, and "logprobs": 0 does ask for something.
        harmless = value is None or any(value is ok or (type(value) is type(ok) and value == ok) for ok in _UNSUPPORTED[name])
        if not harmless:
            raise ApiError(400, f"'{name}' is not supported by this server.", param=name, code="unsupported_parameter")


def _translate(error: ValidationError) -> ApiError:
    """Pydantic's first complaint, without the input that it would repeat."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    location = [str(part) for part in first["loc"]]
    if location[0] == "logit_bias":  # further parts are the client's keys
        location = location[:1]
    param = ".".join(location)
    if first["type"] == "missing":
        return bad_request(param, f"'{param}' is required.", "missing_required_parameter")
    return bad_request(param, f"'{param}': {first['msg']}.")


def chat_generation(request: ChatCompletionRequest, vocab_size: int) -> Generation:
    return _generation(request, vocab_size, request.max_completion_tokens or request.max_tokens)


def completion_generation(request: CompletionRequest, vocab_size: int) -> Generation:
    return _generation(request, vocab_size, request.max_completion_tokens or request.max_tokens or DEFAULT_COMPLETION_TOKENS)


def _generation(request: GenerationBody, vocab_size: int, max_tokens: int | None) -> Generation:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "'stream_options' needs 'stream' to be true.")
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise bad_request("min_tokens", "'min_tokens' is greater than the most tokens that are allowed.")
    stop_token_ids = request.stop_token_ids or []
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    return Generation(
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        n=request.n or 1,
        seed=request.seed,
        max_tokens=max_tokens,
        sampling=_sampling(request, vocab_size),
        stop_token_ids=frozenset(stop_token_ids),
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop=bool(request.include_stop_str_in_output),
        return_token_ids=bool(request.return_token_ids),
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
    )


def _sampling(request: GenerationBody, vocab_size: int) -> pb.SamplingParams:
    bias = _logit_bias(request.logit_bias or {}, vocab_size)
    return pb.SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        min_new_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        logit_bias_ids=bias.keys(),
        logit_bias_values=bias.values(),
        stop_token_ids=request.stop_token_ids,
        stop=_stop_strings(request.stop),
    )


def _stop_strings(stop: Any) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise bad_request("stop", "'stop' must be a string or a list of strings.")
    if len(strings) > limits.MAX_STOP_STRINGS:
        raise bad_request("stop", f"'stop' may have at most {limits.MAX_STOP_STRINGS} strings.")
    if any(not 1 <= len(item) <= limits.MAX_STOP_STRING_CHARS for item in strings):
        raise bad_request("stop", f"A stop string must have 1 to {limits.MAX_STOP_STRING_CHARS} characters.")
    return strings


def _logit_bias(entries: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    low, high = limits.LOGIT_BIAS_RANGE
    bias: dict[int, float] = {}
    for key, value in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request("logit_bias", "The keys of 'logit_bias' must be token ids.")
        if not low <= value <= high:
            raise bad_request("logit_bias", f"The values of 'logit_bias' must be from {low:g} to {high:g}.")
        bias[int(key)] = value
    check_token_ids(list(bias), vocab_size, "logit_bias")
    return bias


def check_token_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Type and range, without a Python loop: prompts have up to millions of ids."""
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        raise bad_request(param, f"'{param}' must hold integers only.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise bad_request(param, f"'{param}' holds a token id outside the vocabulary (0 to {vocab_size - 1}).")


def check_prompt_length(prompt_tokens: int, context_len: int, param: str) -> None:
    if prompt_tokens == 0:
        raise bad_request(param, "The prompt has no tokens.")
    if prompt_tokens >= context_len:
        raise context_length_exceeded(param, context_len, prompt_tokens)
