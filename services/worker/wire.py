"""pb ↔ core types, and the worker's own look at every limit: it may have other front ends than the gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rootstock.v1 import common_pb2, worker_pb2
from services.shared import limits
from services.worker.core.messages import Finish, PeerOutput, Submit
from services.worker.core.sampling import DEFAULT_STREAM_INTERVAL, SamplingParams


class InvalidRequest(ValueError):
    """A submit that can never run. The message names the field and holds nothing of the prompt."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    context_len: int
    vocab_size: int
    allow_auto_truncate: bool


def submit_from_pb(message: worker_pb2.Submit, peer: int, model: ModelLimits, random_seed: int) -> Submit:
    """A checked Submit with every default resolved. random_seed: 64 bits, for a request without a seed.

    Raises InvalidRequest.
    """
    prompt = np.array(message.prompt_ids, dtype=np.uint32).astype(np.int64)
    if not len(prompt):
        raise InvalidRequest("prompt_ids: the prompt is empty")
    if int(prompt.max()) >= model.vocab_size:
        raise InvalidRequest(f"prompt_ids: a token id is not below the vocabulary's size, {model.vocab_size}")
    if model.allow_auto_truncate:
        prompt = prompt[: model.context_len - 1]
    _within(len(message.request_id), limits.MAX_REQUEST_ID_CHARS, "request_id")
    _within(len(message.cache_salt), limits.MAX_CACHE_SALT_CHARS, "cache_salt")
    return Submit(
        peer,
        message.handle,
        message.request_id,
        prompt.astype(np.int32),
        _sampling_from_pb(message.sampling, len(prompt), model, random_seed),
        message.stream,
        message.cache_salt,
        message.priority,
        message.timeout_ms / 1000.0,
    )


def _sampling_from_pb(pb: common_pb2.SamplingParams, prompt_len: int, model: ModelLimits, random_seed: int) -> SamplingParams:
    room = max(model.context_len - prompt_len, 1)
    if pb.HasField("max_new_tokens") and pb.max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens: is below 1")
    max_new = min(pb.max_new_tokens, room) if pb.HasField("max_new_tokens") else room
    _within(len(pb.stop), limits.MAX_STOP_STRINGS, "stop")
    for stop in pb.stop:
        if not 0 < len(stop) <= limits.MAX_STOP_STRING_CHARS:
            raise InvalidRequest(f"stop: a string has {len(stop)} characters; 1 to {limits.MAX_STOP_STRING_CHARS} are allowed")
    _within(len(pb.stop_token_ids), limits.MAX_STOP_TOKEN_IDS, "stop_token_ids")
    top_k = pb.top_k if pb.HasField("top_k") and pb.top_k != 0 else -1
    if top_k < -1:
        raise InvalidRequest("top_k: is below -1")
    return SamplingParams(
        max_new_tokens=max_new,
        temperature=_number(pb, "temperature", 1.0, limits.TEMPERATURE_RANGE),
        top_p=_number(pb, "top_p", 1.0, limits.TOP_P_RANGE, open_low=True),
        top_k=top_k,
        min_p=_number(pb, "min_p", 0.0, limits.MIN_P_RANGE),
        frequency_penalty=_number(pb, "frequency_penalty", 0.0, limits.FREQUENCY_PENALTY_RANGE),
        presence_penalty=_number(pb, "presence_penalty", 0.0, limits.PRESENCE_PENALTY_RANGE),
        repetition_penalty=_number(pb, "repetition_penalty", 1.0, limits.REPETITION_PENALTY_RANGE, open_low=True),
        logit_bias=_logit_bias(pb, model.vocab_size),
        min_new_tokens=min(pb.min_new_tokens, max_new),
        ignore_eos=pb.ignore_eos,
        stop_token_ids=tuple(pb.stop_token_ids),
        stop=tuple(pb.stop),
        seed=pb.seed if pb.HasField("seed") else random_seed,
        skip_special_tokens=pb.skip_special_tokens if pb.HasField("skip_special_tokens") else True,
        stream_interval=max(pb.stream_interval, 1) if pb.HasField("stream_interval") else DEFAULT_STREAM_INTERVAL,
    )


def _logit_bias(pb: common_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(pb.logit_bias_ids) != len(pb.logit_bias_values):
        raise InvalidRequest("logit_bias: ids and values differ in number")
    _within(len(pb.logit_bias_ids), limits.MAX_LOGIT_BIAS_ENTRIES, "logit_bias")
    low, high = limits.LOGIT_BIAS_RANGE
    for token, value in zip(pb.logit_bias_ids, pb.logit_bias_values, strict=True):
        if token >= vocab_size:
            raise InvalidRequest(f"logit_bias: a token id is not below the vocabulary's size, {vocab_size}")
        if not low <= value <= high:
            raise InvalidRequest(f"logit_bias: a value is not within {low} to {high}")
    return tuple(zip(pb.logit_bias_ids, pb.logit_bias_values, strict=True))


def _within(count: int, limit: int, field: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{field}: {count} is more than the {limit} that are allowed")


def _number(
    pb: common_pb2.SamplingParams, field: str, default: float, bounds: tuple[float, float], open_low: bool = False
) -> float:
    if not pb.HasField(field):
        return default
    value = float(getattr(pb, field))
    low, high = bounds
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        raise InvalidRequest(f"{field}: must be within {low} and {high}")
    return value


def refusal_to_pb(message: worker_pb2.Submit, error: InvalidRequest) -> worker_pb2.Finish:
    return worker_pb2.Finish(
        handle=message.handle,
        reason=common_pb2.FINISH_REASON_ABORT,
        error=common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        message=str(error),
        prompt_tokens=len(message.prompt_ids),
    )


def output_to_pb(output: PeerOutput) -> worker_pb2.StepOutput:
    return worker_pb2.StepOutput(
        handles=output.handles,
        counts=output.counts,
        token_ids=output.tokens,
        finishes=[_finish_to_pb(finish) for finish in output.finishes],
    )


def _finish_to_pb(finish: Finish) -> worker_pb2.Finish:
    pb = worker_pb2.Finish(
        handle=finish.handle,
        reason=int(finish.reason),  # type: ignore[arg-type]
        matched_stop=finish.matched_stop,
        error=int(finish.error),  # type: ignore[arg-type]
        message=finish.message,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        completion_tokens=finish.completion_tokens,
        queue_ms=int(finish.queue_s * 1000),
    )
    if finish.matched_token >= 0:
        pb.matched_token = finish.matched_token
    return pb
