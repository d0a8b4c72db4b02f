"""One request's sampling parameters off the wire: every default resolved, every limit of services/shared/limits.py checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootstock.v1 import common_pb2 as pb
from services.shared import limits
from services.shared.sampling_defaults import API_DEFAULTS, SamplingDefaults
from services.worker.core.contracts.sampling import (
    DEFAULT_STREAM_INTERVAL,
    DryParams,
    EmbeddingParams,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
)
from services.worker.text.patterns import InvalidPattern, compile_pattern

DEFAULT_DRY_BREAKERS = ("\n", ":", '"', "*")


class InvalidRequest(ValueError):
    """A submit that can never run. The message begins with the field's name and a colon, and holds nothing of the prompt."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against. embedding_size: numbers in the model's vectors, 0 if it gives none.

    encode_breaker: text → token ids, none of them special; None where there is no tokenizer: DRY is then refused.
    defaults, stream_interval: of requests that do not say; a gateway's say.
    """

    context_len: int
    vocab_size: int
    allow_auto_truncate: bool
    generates: bool = True
    embedding_size: int = 0
    encode_breaker: Callable[[str], Sequence[int]] | None = None
    defaults: SamplingDefaults = API_DEFAULTS
    stream_interval: int = DEFAULT_STREAM_INTERVAL


def sampling_from_pb(
    message: pb.SamplingParams, prompt_len: int, in_session: bool, model: ModelLimits, random_seed: int
) -> SamplingParams:
    """prompt_len: tokens of the prompt; in a session only what the turn adds, so that the core clips max_new_tokens again.

    Raises InvalidRequest.
    """
    embedding = _embedding(message, in_session, model)
    if embedding is None and not model.generates:
        raise InvalidRequest("embedding: this model gives embeddings only")
    max_new = 1 if embedding else _max_new_tokens(message, model.context_len if in_session else model.context_len - prompt_len)
    grammar = _grammar(message)
    logprobs, defaults = message.logprobs, model.defaults
    return SamplingParams(
        max_new_tokens=max_new,
        temperature=_number(message, "temperature", defaults.temperature, limits.TEMPERATURE_RANGE),
        top_p=_number(message, "top_p", defaults.top_p, limits.TOP_P_RANGE),
        top_k=_top_k(message, defaults.top_k),
        min_p=_number(message, "min_p", defaults.min_p, limits.MIN_P_RANGE),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, limits.FREQUENCY_PENALTY_RANGE),
        presence_penalty=_number(message, "presence_penalty", 0.0, limits.PRESENCE_PENALTY_RANGE),
        repetition_penalty=_number(message, "repetition_penalty", defaults.repetition_penalty, limits.REPETITION_PENALTY_RANGE),
        logit_bias=_logit_bias(message, model.vocab_size),
        allowed_token_ids=_token_ids(message.allowed_token_ids, limits.MAX_TOKEN_ID_SET, model, "allowed_token_ids"),
        banned_token_ids=_token_ids(message.banned_token_ids, limits.MAX_TOKEN_ID_SET, model, "banned_token_ids"),
        dry=_dry(message, model),
        # A grammar decides by itself when the output is complete.
        min_new_tokens=0 if grammar else min(message.min_new_tokens, max_new),
        ignore_eos=message.ignore_eos,
        stop_token_ids=_token_ids(message.stop_token_ids, limits.MAX_STOP_TOKEN_IDS, model, "stop_token_ids"),
        stop=_texts(message.stop, limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS, "stop"),
        stop_regex=_stop_regex(message.stop_regex),
        seed=message.seed if message.HasField("seed") else random_seed,
        top_logprobs=_top_logprobs(message),
        logprob_token_ids=_token_ids(logprobs.token_ids, limits.MAX_LOGPROB_TOKEN_IDS, model, "logprobs.token_ids"),
        prompt_logprobs_from=_prompt_logprobs_from(logprobs, model.context_len if in_session else prompt_len),
        grammar=grammar,
        embedding=embedding,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        stream_interval=max(message.stream_interval, 1) if message.HasField("stream_interval") else model.stream_interval,
    )


def within(count: int, limit: int, field: str) -> None:
    """Raises InvalidRequest."""
    if count > limit:
        raise InvalidRequest(f"{field}: {count} is more than the {limit} that are allowed")


def _max_new_tokens(message: pb.SamplingParams, room: int) -> int:
    if not message.HasField("max_new_tokens"):
        return max(room, 1)
    if message.max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens: is below 1")
    return min(message.max_new_tokens, max(room, 1))


def _top_k(message: pb.SamplingParams, default: int) -> int:
    top_k: int = message.top_k if message.HasField("top_k") else default
    if top_k < -1:
        raise InvalidRequest("top_k: is below -1")
    return top_k or -1


def _number(
    message: pb.SamplingParams | pb.Dry,
    field: str,
    default: float,
    bounds: tuple[float, float],
    name: str = "",
) -> float:
    if not message.HasField(field):
        return default
    value = float(getattr(message, field))
    low, high = bounds
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name or field}: must be within {low} and {high}")
    return value


def _token_ids(ids: Sequence[int], most: int, model: ModelLimits, field: str) -> tuple[int, ...]:
    within(len(ids), most, field)
    if ids and max(ids) >= model.vocab_size:
        raise InvalidRequest(f"{field}: a token id is not below the vocabulary's size, {model.vocab_size}")
    return tuple(ids)


def _logit_bias(message: pb.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(message.logit_bias_ids) != len(message.logit_bias_values):
        raise InvalidRequest("logit_bias: ids and values differ in number")
    within(len(message.logit_bias_ids), limits.MAX_LOGIT_BIAS_ENTRIES, "logit_bias")
    low, high = limits.LOGIT_BIAS_RANGE
    bias = tuple(zip(message.logit_bias_ids, message.logit_bias_values, strict=True))
    for token, value in bias:
        if token >= vocab_size:
            raise InvalidRequest(f"logit_bias: a token id is not below the vocabulary's size, {vocab_size}")
        if not low <= value <= high:
            raise InvalidRequest(f"logit_bias: a value is not within {low} to {high}")
    return bias


def _texts(texts: Sequence[str], most: int, most_chars: int, field: str) -> tuple[str, ...]:
    within(len(texts), most, field)
    for text in texts:
        if not 0 < len(text) <= most_chars:
            raise InvalidRequest(f"{field}: a string has {len(text)} characters; 1 to {most_chars} are allowed")
    return tuple(texts)


def _stop_regex(patterns: Sequence[str]) -> tuple[str, ...]:
    checked = _texts(patterns, limits.MAX_STOP_REGEXES, limits.MAX_STOP_REGEX_CHARS, "stop_regex")
    for index, pattern in enumerate(checked):
        _check_pattern(pattern, f"stop_regex[{index}]")
    return checked


def _check_pattern(pattern: str, field: str) -> None:
    """One that matches nothing at all would end every answer before it begins."""
    try:
        compiled = compile_pattern(pattern)
    except InvalidPattern as error:
        raise InvalidRequest(f"{field}: cannot be used: {error}") from None
    if compiled.search("") is not None:
        raise InvalidRequest(f"{field}: matches the empty string")


def _top_logprobs(message: pb.SamplingParams) -> int:
    if not message.HasField("logprobs"):
        return -1
    within(message.logprobs.top, limits.MAX_TOP_LOGPROBS, "logprobs.top")
    return int(message.logprobs.top)


def _prompt_logprobs_from(logprobs: pb.Logprobs, prompt_len: int) -> int:
    if not logprobs.HasField("prompt_from"):
        return -1
    if logprobs.prompt_from >= prompt_len:
        raise InvalidRequest(f"logprobs.prompt_from: {logprobs.prompt_from} lies behind the prompt")
    return int(logprobs.prompt_from)


def _grammar(message: pb.SamplingParams) -> GrammarSpec | None:
    kind = message.grammar.WhichOneof("kind")
    if kind is None:
        if message.HasField("grammar"):
            raise InvalidRequest("grammar: is empty")
        return None
    if kind == "json_object":
        if not message.grammar.json_object:
            raise InvalidRequest("grammar: json_object is false")
        return GrammarSpec(GrammarKind.JSON_OBJECT, "")
    source: str = getattr(message.grammar, kind)
    if not source:
        raise InvalidRequest(f"grammar: {kind} is empty")
    within(len(source.encode()), limits.MAX_GRAMMAR_BYTES, "grammar")
    return GrammarSpec(GrammarKind(kind), source)


def _dry(message: pb.SamplingParams, model: ModelLimits) -> DryParams | None:
    if not message.HasField("dry"):
        return None
    dry = message.dry
    multiplier = _number(dry, "multiplier", 0.0, limits.DRY_MULTIPLIER_RANGE, name="dry_multiplier")
    base = _number(dry, "base", 1.75, limits.DRY_BASE_RANGE, name="dry_base")
    breakers = _texts(dry.breakers, limits.MAX_DRY_BREAKERS, limits.MAX_DRY_BREAKER_CHARS, "dry_sequence_breakers")
    allowed_length = dry.allowed_length if dry.HasField("allowed_length") else 2
    if not 1 <= allowed_length <= limits.MAX_DRY_ALLOWED_LENGTH:
        raise InvalidRequest(f"dry_allowed_length: must be within 1 and {limits.MAX_DRY_ALLOWED_LENGTH}")
    within(dry.window, limits.MAX_DRY_WINDOW, "dry_penalty_last_n")
    if multiplier == 0.0:
        return None
    return DryParams(multiplier, base, allowed_length, dry.window, _breaker_ids(breakers or DEFAULT_DRY_BREAKERS, model))


def _breaker_ids(texts: Sequence[str], model: ModelLimits) -> tuple[int, ...]:
    """A text's last token stands for it: the one that a repeat would have to run across."""
    if model.encode_breaker is None:
        raise InvalidRequest("dry_multiplier: this worker has no tokenizer")
    encoded = [model.encode_breaker(text) for text in texts]
    return tuple(sorted({ids[-1] for ids in encoded if ids}))


def _embedding(message: pb.SamplingParams, in_session: bool, model: ModelLimits) -> EmbeddingParams | None:
    if not message.HasField("embedding"):
        return None
    if not model.embedding_size:
        raise InvalidRequest("embedding: this model gives none")
    if message.HasField("grammar") or message.HasField("logprobs") or in_session:
        raise InvalidRequest("embedding: excludes grammar, logprobs and session")
    wanted = message.embedding
    if wanted.dimensions > model.embedding_size:
        raise InvalidRequest(f"embedding.dimensions: {wanted.dimensions} is more than the model's {model.embedding_size}")
    return EmbeddingParams(wanted.dimensions, wanted.normalize if wanted.HasField("normalize") else None)
