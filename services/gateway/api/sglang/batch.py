"""Assigns the fields of a /generate or /encode request to its prompts. Pure; raises ApiError.

In SGLang's API, a field may have one value for all prompts, or a list with one value per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.gateway.api.generation_params import check_token_ids
from rootstock_llm.services.gateway.api.known_fields import NATIVE_SAMPLING
from rootstock_llm.services.gateway.api.request_body import INT32, RID_CHARS, check_turn, session_turn
from rootstock_llm.services.gateway.api.sglang.sampling import LogprobSettings, native_generation, parse
from rootstock_llm.services.gateway.api.sglang.types import NativeGenerateRequest, NativeInput, NativeSampling
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.gateway.generation.request import GenerationParams, check_sets
from rootstock_llm.services.shared import limits


@dataclass(frozen=True, slots=True)
class Inputs:
    """The prompts of a request, as texts or as lists of token ids."""

    field: str  # the client's field of the prompts, "text" or "input_ids"
    # One text or one list of ids per prompt.
    prompts: Sequence[Any]
    many: bool  # whether the client sent a list of prompts, and gets a list of outputs

    def where(self, index: int) -> str:
        """Returns the path, in the client's body, of the prompt with this index."""
        return f"{self.field}[{index}]" if self.many else self.field


@dataclass(frozen=True, slots=True)
class Form:
    """The parts of the output that the client wants for one prompt."""

    logprobs: LogprobSettings | None  # requested log probabilities, or None
    without_output: bool  # whether the output has no tokens and no text, because max_new_tokens is 0


@dataclass(frozen=True, slots=True)
class PromptGeneration:
    """The parameters of one prompt, and the form of its outputs."""

    params: GenerationParams
    form: Form


def inputs_of(request: NativeInput) -> Inputs:
    if (request.text is None) == (request.input_ids is None):
        raise bad_request("text", "Send exactly one of 'text' and 'input_ids'.")
    if request.text is not None:
        return _texts(request.text)
    return _ids(request.input_ids)


def _texts(text: Any) -> Inputs:
    if isinstance(text, str):
        return Inputs("text", [text], False)
    if isinstance(text, list):
        _check_count(len(text), "text")
    if not isinstance(text, list) or not text or not all(isinstance(item, str) for item in text):
        raise bad_request("text", "'text' must be a string or a list of strings.")
    return Inputs("text", text, True)


def _ids(ids: Any) -> Inputs:
    if not isinstance(ids, list) or not ids:
        raise bad_request("input_ids", "'input_ids' must be a list of token ids or a list of such lists.")
    if not isinstance(ids[0], list):
        return Inputs("input_ids", [ids], False)
    _check_count(len(ids), "input_ids")
    if not all(isinstance(item, list) for item in ids):
        raise bad_request("input_ids", "'input_ids' must be a list of token ids, or a list of lists of token ids.")
    return Inputs("input_ids", ids, True)


def _check_count(count: int, param: str) -> None:
    if count > limits.MAX_BATCH_PROMPTS:
        raise bad_request(param, f"'{param}' may have at most {limits.MAX_BATCH_PROMPTS} prompts.")


def rids_of(given: Any, inputs: Inputs, request_id: str) -> list[str]:
    """Returns the request id of each prompt.

    If the client sent a list of ids, it has one id per prompt. Otherwise, the id is the client's single id, or the id of the HTTP
    request if the client sent none. If the client sent a list of prompts, this id gets the suffix _0, _1, … for each prompt.
    """
    rids = _one_per_prompt(given, inputs, "rid") if isinstance(given, list) else [request_id if given is None else given]
    if not all(isinstance(rid, str) and 1 <= len(rid) <= RID_CHARS for rid in rids):
        raise bad_request("rid", f"A 'rid' must be a string of 1 to {RID_CHARS} characters.")
    if not isinstance(given, list):
        return [f"{rids[0]}_{i}" for i in range(len(inputs.prompts))] if inputs.many else rids
    if len(set(rids)) != len(rids):
        raise bad_request("rid", "'rid' must have a different id for each prompt.")
    return rids


def generations_of(request: NativeGenerateRequest, inputs: Inputs, vocab_size: int) -> list[PromptGeneration]:
    """Returns the parameters of each prompt, and the form of its outputs. Prompts with equal parameters share one object."""
    sampling = _sampling_of(request, inputs)
    all_logprobs = _logprobs_of(request, inputs, vocab_size)
    n = sampling[0][1].n or 1
    if any((given.n or 1) != n for _, given in sampling):
        raise bad_request("sampling_params.n", "'n' must be the same for all prompts.")
    if len(sampling) * n > limits.MAX_BATCH_PROMPTS:
        raise bad_request("sampling_params.n", f"The number of prompts times 'n' may be at most {limits.MAX_BATCH_PROMPTS}.")
    if session_turn(request.session_params) is not None:
        prompt_logprobs = any(logprobs is not None and logprobs.start >= 0 for logprobs in all_logprobs)
        check_turn(not inputs.many and n == 1, "logprob_start_len" if prompt_logprobs else None)
    shared: dict[tuple[int, LogprobSettings | None], PromptGeneration] = {}  # by sampling parameters and log probabilities
    generations = []
    for (where, given), logprobs in zip(sampling, all_logprobs, strict=True):
        if (id(given), logprobs) not in shared:
            params = native_generation(given, logprobs, request, vocab_size, where, inputs.field)
            shared[id(given), logprobs] = PromptGeneration(params, Form(logprobs, given.max_new_tokens == 0))
        generations.append(shared[id(given), logprobs])
    return generations


def _sampling_of(request: NativeGenerateRequest, inputs: Inputs) -> list[tuple[str, NativeSampling]]:
    """Returns the sampling parameters of each prompt, each with its path in the client's body."""
    given = request.sampling_params
    if isinstance(given, list):
        values = _one_per_prompt(given, inputs, "sampling_params")
        paths = [f"sampling_params[{i}]" for i in range(len(values))]
        return _parsed_list(values, paths)
    one = parse(NativeSampling, {} if given is None else given, "sampling_params", NATIVE_SAMPLING)
    choices = len(inputs.prompts) * (one.n or 1)
    check_sets(one.allowed_token_ids, one.banned_token_ids, choices, "sampling_params.")
    return [("sampling_params", one)] * len(inputs.prompts)


def _parsed_list(values: Sequence[Any], paths: Sequence[str]) -> list[tuple[str, NativeSampling]]:
    parsed: list[tuple[str, NativeSampling]] = []
    allowed: list[int] = []
    banned: list[int] = []
    for path, value in zip(paths, values, strict=True):
        given = parse(NativeSampling, value, path, NATIVE_SAMPLING)
        allowed += given.allowed_token_ids or ()
        banned += given.banned_token_ids or ()
        check_sets(allowed, banned, given.n or 1, f"{path}.")
        parsed.append((path, given))
    return parsed


def _logprobs_of(request: NativeGenerateRequest, inputs: Inputs, vocab_size: int) -> list[LogprobSettings | None]:
    requested = _values_of_type(request.return_logprob, inputs, "return_logprob", bool, False)
    starts = _values_of_type(request.logprob_start_len, inputs, "logprob_start_len", int, -1)
    tops = _values_of_type(request.top_logprobs_num, inputs, "top_logprobs_num", int, 0)
    chosen = _token_ids_of(request.token_ids_logprob, inputs)
    return [
        _checked_logprobs(start, top, ids, vocab_size) if is_requested else None
        for is_requested, start, top, ids in zip(requested, starts, tops, chosen, strict=True)
    ]


def _checked_logprobs(start: int, top: int, ids: list[Any], vocab_size: int) -> LogprobSettings:
    if not -1 <= start <= INT32[1]:
        raise bad_request("logprob_start_len", "'logprob_start_len' must be -1 or the index of a prompt token.")
    if not 0 <= top <= limits.MAX_TOP_LOGPROBS:
        raise bad_request("top_logprobs_num", f"'top_logprobs_num' must be from 0 to {limits.MAX_TOP_LOGPROBS}.")
    if len(ids) > limits.MAX_LOGPROB_TOKEN_IDS:
        raise bad_request("token_ids_logprob", f"'token_ids_logprob' may have at most {limits.MAX_LOGPROB_TOKEN_IDS} ids.")
    check_token_ids(ids, vocab_size, "token_ids_logprob")
    return LogprobSettings(top, tuple(ids), start)


def _token_ids_of(given: Any, inputs: Inputs) -> list[list[Any]]:
    """Returns the token ids whose log probabilities each prompt wants.

    A list of ids applies to every prompt. A list of lists has one list per prompt.
    """
    if given is None:
        return [[]] * len(inputs.prompts)
    if not isinstance(given, list):
        raise bad_request("token_ids_logprob", "'token_ids_logprob' must be a list of token ids or a list of such lists.")
    if not given or isinstance(given[0], int):
        return [given] * len(inputs.prompts)
    lists = [[] if item is None else item for item in _one_per_prompt(given, inputs, "token_ids_logprob")]
    if not all(isinstance(item, list) for item in lists):
        raise bad_request(
            "token_ids_logprob", "'token_ids_logprob' must be a list of token ids, or a list of lists of token ids."
        )
    return lists


def _values_of_type(given: Any, inputs: Inputs, param: str, kind: type, default: Any) -> list[Any]:
    values = _one_per_prompt(given, inputs, param) if isinstance(given, list) else [given] * len(inputs.prompts)
    values = [default if value is None else value for value in values]
    if any(type(value) is not kind for value in values):
        raise bad_request(param, f"'{param}' must be {kind.__name__}, or a list with one {kind.__name__} for each prompt.")
    return values


def _one_per_prompt(given: list[Any], inputs: Inputs, param: str) -> list[Any]:
    if len(given) != len(inputs.prompts):
        raise bad_request(param, f"'{param}' must have one entry for each prompt.")
    return given
