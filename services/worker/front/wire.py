"""Converts requests from the wire, resolves every default and checks every limit.

The worker repeats the checks of the gateway, because other clients may connect. The limits and the defaults of sampling
parameters are in services/shared/sampling_parameters.py and services/shared/limits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared import sampling_parameters as table
from rootstock_llm.services.shared.field_refusal import worded
from rootstock_llm.services.shared.sampling_parameters import API_DEFAULTS, SMALLEST_POSITIVE, SamplingDefaults, SamplingParameter
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarPart, GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import PagesReady, Prefetch, SessionTurn, Submit
from rootstock_llm.services.worker.core.contracts.plan import (
    DEFAULT_STREAM_INTERVAL,
    DryParams,
    EmbeddingParams,
    SamplingParams,
    ScoreParams,
    no_tokens,
)
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation, KvSource
from rootstock_llm.services.worker.text.patterns import InvalidPattern, compile_pattern

DEFAULT_DRY_BREAKERS = ("\n", ":", '"', "*")


class InvalidRequest(ValueError):
    """A field of a request is invalid. The request is refused with this message, which the client gets."""

    def __init__(self, field: str, why: str, element: int | None = None) -> None:
        """Builds the message for the client.

        Args:
            field: the invalid field, as in rootstock.v1.Finish.
            why: the fault, without the field's name and without text of the prompt.
            element: index of the invalid value in a repeated field; None for other fields.
        """
        super().__init__(worded(field, element, why))
        self.field = field
        self.why = why
        self.element = element


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits and defaults of the served model, against which requests are checked."""

    context_len: int  # largest number of tokens of prompt and output
    vocab_size: int
    allow_auto_truncate: bool  # whether a prompt that exceeds the context is cut; if False, it is refused
    generates: bool = True  # whether the model generates tokens; False for embedding models
    embedding_size: int = 0  # elements of the model's embedding vectors; 0: the model has no embeddings
    # Returns the token ids of a DRY sequence breaker, without special tokens. None: there is no tokenizer; DRY is refused.
    encode_breaker: Callable[[str], Sequence[int]] | None = None
    defaults: SamplingDefaults = API_DEFAULTS  # values of the sampling parameters that a request leaves out
    stream_interval: int = DEFAULT_STREAM_INTERVAL  # output tokens per message, for requests without this parameter
    reads_predictions: bool = False  # whether the drafter uses a request's predicted output
    routed_per_token: int = 0  # expert ids of a token in the output; 0: the worker returns no routed experts


def submit_from_pb(
    message: worker_pb2.Submit, peer: int, model: ModelLimits, random_seed: int, reservation: KvReservation | None = None
) -> Submit:
    """Returns a checked Submit with every default resolved.

    Args:
        message: the request on the wire.
        peer: number of the gateway stream.
        model: the model's limits.
        random_seed: 64-bit seed for a request without a seed.
        reservation: KV reservation for a request that a decode worker continues. None if the message requests no handover, or if
            this worker has no KV port.

    Raises:
        InvalidRequest: a field is invalid.
    """
    check_limit(len(message.request_id), limits.MAX_REQUEST_ID_CHARS, "request_id", "characters")
    check_limit(len(message.cache_salt), limits.MAX_CACHE_SALT_CHARS, "cache_salt", "characters")
    check_limit(len(message.routing_key), limits.MAX_ROUTING_KEY_CHARS, "routing_key", "characters")
    check_limit(len(message.revision), limits.MAX_REVISION_CHARS, "revision", "characters")
    check_limit(len(message.tenant), limits.MAX_TENANT_BYTES, "tenant", "bytes")
    if not 0 <= message.tenant_weight < float("inf"):
        raise InvalidRequest("tenant_weight", "must be finite and not negative")
    session = _session_from_pb(message)
    prompt = _prompt_from_pb(message, model)
    output = _output_from_pb(message, len(prompt), model)
    params = sampling_from_pb(message.sampling, len(prompt), session is not None, model, random_seed)
    return Submit(
        peer,
        message.handle,
        message.request_id,
        prompt,
        params,
        message.stream,
        message.cache_salt,
        message.priority,
        message.timeout_ms / 1000.0,
        routing_key=message.routing_key,
        session=session,
        output_ids=output,
        revision=message.revision,
        tenant=message.tenant,
        batch=message.batch,
        weight=message.tenant_weight or 1.0,
        hand_over=_hand_over(message, reservation),
        source=_source_from_pb(message),
        routed_from=_routed_from(message, len(prompt) + len(output), len(prompt) + params.max_new_tokens, model),
        prediction=_prediction_from_pb(message, model),
    )


def prefetch_from_pb(message: worker_pb2.Prefetch, peer: int, model: ModelLimits) -> Prefetch:
    """Returns a checked Prefetch. Raises InvalidRequest if a field is invalid."""
    check_limit(len(message.cache_salt), limits.MAX_CACHE_SALT_CHARS, "cache_salt", "characters")
    check_limit(len(message.revision), limits.MAX_REVISION_CHARS, "revision", "characters")
    if not message.HasField("source"):
        raise InvalidRequest("source", "is missing")
    prompt, source = _ids_from_pb(message.prompt_ids, model), _kv_source_from_pb(message.source)
    return Prefetch(
        peer, message.handle, prompt, source, message.cache_salt, revision=message.revision, priority=message.priority
    )


def ready_from_pb(message: worker_pb2.PagesReady) -> PagesReady:
    """Returns checked PagesReady. Raises InvalidRequest if a field is invalid."""
    return PagesReady(message.handle, _reservation_from_pb(message.room, "room"), message.room.pages)


def _hand_over(message: worker_pb2.Submit, reservation: KvReservation | None) -> KvReservation | None:
    if not message.hand_over:
        return None
    if message.HasField("session") or _is_measured(message):
        raise InvalidRequest("hand_over", "cannot be combined with session, embedding or score")
    if reservation is None:
        raise InvalidRequest("hand_over", "this worker reserves no KV for other workers")
    return reservation


def _routed_from(message: worker_pb2.Submit, num_known: int, most: int, model: ModelLimits) -> int:
    """Returns the checked position of the first token whose routed experts are returned, or -1 for none.

    Args:
        message: the request.
        num_known: tokens of prompt and given output.
        most: largest number of tokens of prompt and output.
        model: the model's limits.
    """
    if not message.HasField("routed_experts_from"):
        return -1
    first, field = int(message.routed_experts_from), "routed_experts_from"
    if not model.routed_per_token:
        off = "--enable-return-routed-experts is off, or the model has no experts"
        raise InvalidRequest(field, f"this worker returns no routed experts: {off}")
    if message.HasField("session") or message.hand_over or _is_measured(message):
        raise InvalidRequest(field, "cannot be combined with session, hand_over, embedding or score")
    if first > num_known:
        raise InvalidRequest(field, f"{first} exceeds the {num_known} tokens of prompt and output_ids")
    check_limit(max(most - first, 0) * model.routed_per_token, limits.MAX_ROUTED_EXPERT_IDS, field, "expert ids")
    return first


def _source_from_pb(message: worker_pb2.Submit) -> KvSource | None:
    if message.HasField("source") and (message.HasField("session") or _is_measured(message)):
        raise InvalidRequest("source", "cannot be combined with session, embedding or score")
    return source_from_pb(message)


def source_from_pb(message: worker_pb2.Submit) -> KvSource | None:
    """Returns the KV source of a submit, or None. Checks no other field. Raises InvalidRequest if the source is invalid."""
    return _kv_source_from_pb(message.source) if message.HasField("source") else None


def _kv_source_from_pb(source: worker_pb2.KvSource) -> KvSource:
    check_limit(len(source.address), limits.MAX_ADDRESS_CHARS, "source.address", "characters")
    return KvSource(_reservation_from_pb(source.room, "source.room"), source.address, source.room.pages)


def _reservation_from_pb(room: worker_pb2.KvRoom, field: str) -> KvReservation:
    if len(room.secret) != RESERVATION_SECRET_BYTES:
        raise InvalidRequest(f"{field}.secret", f"must have {RESERVATION_SECRET_BYTES} bytes, not {len(room.secret)}")
    if not room.pages:
        raise InvalidRequest(f"{field}.pages", "must be at least 1")
    return KvReservation(room.room, room.epoch, room.secret)


def _output_from_pb(message: worker_pb2.Submit, prompt_len: int, model: ModelLimits) -> tuple[int, ...]:
    """Returns the checked output tokens that another worker has sampled; empty for a new request."""
    output = tuple(message.output_ids)
    if not output:
        return ()
    if message.HasField("session"):
        raise InvalidRequest("output_ids", "cannot be combined with session")
    if _is_measured(message):
        raise InvalidRequest("output_ids", "cannot be combined with embedding or score")
    if prompt_len + len(output) > model.context_len:
        found = f"prompt and output have {prompt_len + len(output)} tokens"
        raise InvalidRequest("output_ids", f"{found}; the model's context is {model.context_len}")
    if max(output) >= model.vocab_size:
        raise InvalidRequest("output_ids", f"a token id is not below the vocabulary size {model.vocab_size}")
    return output


def _prediction_from_pb(message: worker_pb2.Submit, model: ModelLimits) -> NDArray[np.int32]:
    """Returns the checked tokens of the predicted output; empty if the drafter does not use predictions."""
    check_limit(len(message.prediction_ids), limits.MAX_PREDICTION_TOKENS, "prediction_ids", "tokens")
    prediction = np.array(message.prediction_ids, dtype=np.uint32)
    if len(prediction) and int(prediction.max()) >= model.vocab_size:
        raise InvalidRequest("prediction_ids", f"a token id is not below the vocabulary size {model.vocab_size}")
    return prediction.astype(np.int32) if model.reads_predictions else no_tokens()


def _prompt_from_pb(message: worker_pb2.Submit, model: ModelLimits) -> NDArray[np.int32]:
    """Returns the checked prompt as int32[n], n >= 1.

    With allow_auto_truncate, a prompt that exceeds the context is cut. The cut leaves one token of the context for the output,
    unless the request is for an embedding or a score. The prompt of a session turn is not cut here, because only the core has the
    session's earlier tokens.
    """
    prompt = _ids_from_pb(message.prompt_ids, model)
    if model.allow_auto_truncate and not message.HasField("session"):
        prompt = prompt[: model.context_len - (0 if _is_measured(message) else 1)]
    return prompt


def _is_measured(message: worker_pb2.Submit) -> bool:
    """Whether the request is for an embedding or a score. It samples no token, so its prompt may fill the context."""
    return bool(message.sampling.HasField("embedding") or message.sampling.HasField("score"))


def _ids_from_pb(ids: Sequence[int], model: ModelLimits) -> NDArray[np.int32]:
    """Returns checked token ids as int32[n], n >= 1."""
    prompt = np.array(ids, dtype=np.uint32)
    if not len(prompt):
        raise InvalidRequest("prompt_ids", "the prompt is empty")
    if int(prompt.max()) >= model.vocab_size:
        raise InvalidRequest("prompt_ids", f"a token id is not below the vocabulary size {model.vocab_size}")
    return prompt.astype(np.int32)


def _session_from_pb(message: worker_pb2.Submit) -> SessionTurn | None:
    if not message.HasField("session"):
        return None
    turn = message.session
    if not turn.session_id:
        raise InvalidRequest("session", "session_id is empty")
    check_limit(len(turn.session_id), limits.MAX_SESSION_ID_CHARS, "session.session_id", "characters")
    check_limit(len(turn.parent_request_id), limits.MAX_REQUEST_ID_CHARS, "session.parent_request_id", "characters")
    offset = turn.offset if turn.HasField("offset") else -1
    return SessionTurn(turn.session_id, turn.parent_request_id, offset, turn.replace, turn.drop_previous_output)


def check_limit(count: int, limit: int, field: str, unit: str) -> None:
    """Raises InvalidRequest if a count exceeds its limit. `unit` names the counted elements in the message, in the plural."""
    if count > limit:
        raise InvalidRequest(field, f"{count} {unit} exceed the limit of {limit}")


def sampling_from_pb(
    message: pb.SamplingParams, prompt_len: int, in_session: bool, model: ModelLimits, random_seed: int
) -> SamplingParams:
    """Returns a request's checked sampling parameters.

    Args:
        message: the parameters on the wire.
        prompt_len: number of prompt tokens. In a session, it counts only the tokens of this turn; the core limits max_new_tokens
            again with the session's length.
        in_session: whether the request is a turn of a session.
        model: the model's limits.
        random_seed: seed for a request without one.

    Raises:
        InvalidRequest: a parameter is invalid.
    """
    embedding = _embedding(message, in_session, model)
    if embedding is None and not model.generates:
        raise InvalidRequest("embedding", "is missing; this model computes only embeddings")
    score = _score(message, in_session, model)
    max_new = _max_new_tokens(message, model.context_len if in_session else model.context_len - prompt_len)
    max_new = 0 if embedding or score else max_new
    grammar = _grammar(message)
    scalars = _scalars(message, model)
    # A grammar determines when the output is complete, so min_new_tokens does not apply.
    scalars["min_new_tokens"] = 0 if grammar else min(scalars["min_new_tokens"], max_new)
    logprobs = message.logprobs
    return SamplingParams(
        max_new_tokens=max_new,
        **scalars,
        logit_bias=_logit_bias(message, model.vocab_size),
        allowed_token_ids=_listed_ids(message, table.ALLOWED_TOKEN_IDS, model),
        banned_token_ids=_listed_ids(message, table.BANNED_TOKEN_IDS, model),
        dry=_dry(message, model),
        stop_token_ids=_listed_ids(message, table.STOP_TOKEN_IDS, model),
        stop=_texts(message.stop, table.STOP),
        stop_regex=_stop_regex(message.stop_regex),
        seed=message.seed if message.HasField("seed") else random_seed,
        top_logprobs=_top_logprobs(message),
        logprob_token_ids=_token_ids(logprobs.token_ids, limits.MAX_LOGPROB_TOKEN_IDS, model, "logprobs.token_ids"),
        prompt_logprobs_from=_prompt_logprobs_from(logprobs, model.context_len if in_session else prompt_len),
        grammar=grammar,
        embedding=embedding,
        score=score,
    )


def _scalars(message: pb.SamplingParams, model: ModelLimits) -> dict[str, Any]:
    """Returns the scalar sampling parameters by name. The wire and the core use the same names.

    A top_p of 0 selects the most likely token, as temperature 0 does. It is converted to temperature 0 and top_p 1, so that no
    sampler has to handle a top_p of 0.
    """
    by_model: dict[str, Any] = {**model.defaults.as_dict(), "stream_interval": model.stream_interval}
    found = {row.wire: _scalar(message, row.wire, row, by_model.get(row.wire, row.default)) for row in table.SCALARS}
    return found if found["top_p"] >= SMALLEST_POSITIVE else {**found, "temperature": 0.0, "top_p": 1.0}


def _scalar(message: pb.SamplingParams | pb.Dry, field: str, row: SamplingParameter, default: Any, name: str = "") -> Any:
    if not message.HasField(field):
        return default
    value = getattr(message, field)
    if wrong := row.fault(value):
        raise InvalidRequest(name or field, wrong)
    return row.resolved(value)


def _max_new_tokens(message: pb.SamplingParams, budget: int) -> int:
    if not message.HasField("max_new_tokens"):
        return max(budget, 1)
    return min(message.max_new_tokens, max(budget, 1))


def _listed_ids(message: pb.SamplingParams, row: SamplingParameter, model: ModelLimits) -> tuple[int, ...]:
    return _token_ids(getattr(message, row.wire), row.most, model, row.wire)


def _token_ids(ids: Sequence[int], most: int, model: ModelLimits, field: str) -> tuple[int, ...]:
    check_limit(len(ids), most, field, "token ids")
    if ids and max(ids) >= model.vocab_size:
        raise InvalidRequest(field, f"a token id is not below the vocabulary size {model.vocab_size}")
    return tuple(ids)


def _logit_bias(message: pb.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(message.logit_bias_ids) != len(message.logit_bias_values):
        ids, values = len(message.logit_bias_ids), len(message.logit_bias_values)
        raise InvalidRequest("logit_bias", f"has {ids} token ids, but {values} values")
    check_limit(len(message.logit_bias_ids), table.LOGIT_BIAS.most, "logit_bias", "token ids")
    bias = tuple(zip(message.logit_bias_ids, message.logit_bias_values, strict=True))
    for token, value in bias:
        if token >= vocab_size:
            raise InvalidRequest("logit_bias", f"a token id is not below the vocabulary size {vocab_size}")
        if wrong := table.LOGIT_BIAS.fault(value):
            raise InvalidRequest("logit_bias", f"a value {wrong}")
    return bias


def _texts(texts: Sequence[str], row: SamplingParameter, name: str = "") -> tuple[str, ...]:
    field = name or row.wire
    check_limit(len(texts), row.most, field, "strings")
    for text in texts:
        if not 0 < len(text) <= row.chars:
            raise InvalidRequest(field, f"a string has {len(text)} characters; 1 to {row.chars} are allowed")
    return tuple(texts)


def _stop_regex(patterns: Sequence[str]) -> tuple[str, ...]:
    checked = _texts(patterns, table.STOP_REGEX)
    for index, pattern in enumerate(checked):
        _check_pattern(pattern, index)
    return checked


def _check_pattern(pattern: str, element: int) -> None:
    """Checks that a pattern compiles and does not match the empty string, which would end every output at its first token."""
    try:
        compiled = compile_pattern(pattern)
    except InvalidPattern as error:
        raise InvalidRequest("stop_regex", f"cannot be used: {error}", element) from None
    if compiled.search("") is not None:
        raise InvalidRequest("stop_regex", "matches the empty string", element)


def _top_logprobs(message: pb.SamplingParams) -> int:
    if not message.HasField("logprobs"):
        return -1
    check_limit(message.logprobs.top, limits.MAX_TOP_LOGPROBS, "logprobs.top", "logprobs")
    return int(message.logprobs.top)


def _prompt_logprobs_from(logprobs: pb.Logprobs, prompt_len: int) -> int:
    if not logprobs.HasField("prompt_from"):
        return -1
    if logprobs.prompt_from >= prompt_len:
        raise InvalidRequest("logprobs.prompt_from", f"{logprobs.prompt_from} is not below the prompt's length {prompt_len}")
    return int(logprobs.prompt_from)


def _grammar(message: pb.SamplingParams) -> GrammarSpec | None:
    kind = message.grammar.WhichOneof("kind")
    if kind is None:
        if message.HasField("grammar"):
            raise InvalidRequest("grammar", "the grammar is empty")
        return None
    if kind == "json_object":
        if not message.grammar.json_object:
            raise InvalidRequest("grammar", "the grammar's json_object is false; set it to true, or omit the grammar")
        return GrammarSpec(GrammarKind.JSON_OBJECT, "")
    source: str = getattr(message.grammar, kind)
    if not source:
        raise InvalidRequest("grammar", f"the grammar's {kind} is empty")
    check_limit(len(source.encode()), limits.MAX_GRAMMAR_BYTES, "grammar", "bytes")
    parts = tuple(GrammarPart(part.pointer, part.within, part.partial) for part in message.grammar.parts)
    check_limit(sum(len(part.pointer) + len(part.within) + 1 for part in parts), limits.MAX_GRAMMAR_BYTES, "grammar", "bytes")
    return GrammarSpec(GrammarKind(kind), source, parts)


def _dry(message: pb.SamplingParams, model: ModelLimits) -> DryParams | None:
    if not message.HasField("dry"):
        return None
    dry = message.dry
    multiplier = _scalar(dry, "multiplier", table.DRY_MULTIPLIER, table.DRY_MULTIPLIER.default, "dry_multiplier")
    base = _scalar(dry, "base", table.DRY_BASE, table.DRY_BASE.default, "dry_base")
    length = _scalar(dry, "allowed_length", table.DRY_ALLOWED_LENGTH, table.DRY_ALLOWED_LENGTH.default, "dry_allowed_length")
    window = _scalar(dry, "window", table.DRY_PENALTY_LAST_N, 0, "dry_penalty_last_n")
    breakers = _texts(dry.breakers, table.DRY_SEQUENCE_BREAKERS, "dry_sequence_breakers")
    if multiplier == 0.0:
        return None
    return DryParams(multiplier, base, length, window, _breaker_ids(breakers or DEFAULT_DRY_BREAKERS, model))


def _breaker_ids(texts: Sequence[str], model: ModelLimits) -> tuple[int, ...]:
    """Returns the last token of each text. A repetition that contains a breaker's text usually contains this token, too."""
    if model.encode_breaker is None:
        raise InvalidRequest("dry_multiplier", "this worker has no tokenizer")
    encoded = [model.encode_breaker(text) for text in texts]
    return tuple(sorted({ids[-1] for ids in encoded if ids}))


def _embedding(message: pb.SamplingParams, in_session: bool, model: ModelLimits) -> EmbeddingParams | None:
    if not message.HasField("embedding"):
        return None
    if not model.embedding_size:
        raise InvalidRequest("embedding", "this model computes no embeddings")
    if message.HasField("grammar") or message.HasField("logprobs") or in_session:
        raise InvalidRequest("embedding", "cannot be combined with grammar, logprobs or session")
    wanted = message.embedding
    if wanted.dimensions > model.embedding_size:
        raise InvalidRequest("embedding.dimensions", f"{wanted.dimensions} exceeds the model's {model.embedding_size} dimensions")
    return EmbeddingParams(wanted.dimensions, wanted.normalize if wanted.HasField("normalize") else None)


def _score(message: pb.SamplingParams, in_session: bool, model: ModelLimits) -> ScoreParams | None:
    if not message.HasField("score"):
        return None
    if message.HasField("embedding") or message.HasField("grammar") or message.HasField("logprobs") or in_session:
        raise InvalidRequest("score", "cannot be combined with embedding, grammar, logprobs or session")
    labels = _token_ids(message.score.label_token_ids, limits.MAX_LABEL_TOKEN_IDS, model, "score.label_token_ids")
    if not labels:
        raise InvalidRequest("score.label_token_ids", f"has no ids; 1 to {limits.MAX_LABEL_TOKEN_IDS} are allowed")
    return ScoreParams(labels)
