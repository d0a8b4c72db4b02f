"""Conversion between protobuf and core types. Every limit is checked, because clients other than the gateway may connect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock.v1 import common_pb2, worker_pb2
from services.shared import limits
from services.shared.field_refusal import worded
from services.worker.core.contracts.messages import Finish, PagesReady, PeerOutput, Prefetch, SessionTurn, Submit
from services.worker.core.contracts.plan import PromptLogprobs, RowLogprobs, no_tokens
from services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation, KvSource
from services.worker.core.contracts.transfers import Tier
from services.worker.front.invalid_request import InvalidRequest
from services.worker.front.sampling_wire import ModelLimits, sampling_from_pb, within

__all__ = [
    "InvalidRequest",
    "ModelLimits",
    "output_to_pb",
    "prefetch_from_pb",
    "ready_from_pb",
    "refusal_to_pb",
    "submit_from_pb",
]


def submit_from_pb(
    message: worker_pb2.Submit, peer: int, model: ModelLimits, random_seed: int, room: KvReservation | None = None
) -> Submit:
    """Returns a checked Submit with every default resolved.

    Args:
        message: the request on the wire.
        peer: number of the gateway stream.
        model: the model's limits.
        random_seed: 64 bits, for a request without a seed.
        room: reservation for a request that is to be handed over; None if this worker has no KV port.

    Raises:
        InvalidRequest: a field is invalid.
    """
    within(len(message.request_id), limits.MAX_REQUEST_ID_CHARS, "request_id")
    within(len(message.cache_salt), limits.MAX_CACHE_SALT_CHARS, "cache_salt")
    within(len(message.routing_key), limits.MAX_ROUTING_KEY_CHARS, "routing_key")
    within(len(message.revision), limits.MAX_REVISION_CHARS, "revision")
    within(len(message.tenant), limits.MAX_TENANT_BYTES, "tenant")
    if not 0 <= message.tenant_weight < float("inf"):
        raise InvalidRequest("tenant_weight", "must be a positive number")
    session = _session_from_pb(message)
    prompt = _prompt_from_pb(message, model)
    output = _output_from_pb(message, len(prompt), model)
    return Submit(
        peer,
        message.handle,
        message.request_id,
        prompt,
        sampling_from_pb(message.sampling, len(prompt), session is not None, model, random_seed),
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
        hand_over=_hand_over(message, room),
        source=_source_from_pb(message),
        prediction=_prediction_from_pb(message, model),
    )


def prefetch_from_pb(message: worker_pb2.Prefetch, peer: int, model: ModelLimits) -> Prefetch:
    """Returns a checked Prefetch. Raises InvalidRequest if a field is invalid."""
    within(len(message.cache_salt), limits.MAX_CACHE_SALT_CHARS, "cache_salt")
    within(len(message.revision), limits.MAX_REVISION_CHARS, "revision")
    if not message.HasField("source"):
        raise InvalidRequest("source", "is missing")
    prompt, source = _ids_from_pb(message.prompt_ids, model), _kv_source_from_pb(message.source)
    return Prefetch(
        peer, message.handle, prompt, source, message.cache_salt, revision=message.revision, priority=message.priority
    )


def ready_from_pb(message: worker_pb2.PagesReady) -> PagesReady:
    """Returns checked PagesReady. Raises InvalidRequest if a field is invalid."""
    return PagesReady(message.handle, _room_from_pb(message.room, "room"), message.room.pages)


def _hand_over(message: worker_pb2.Submit, room: KvReservation | None) -> KvReservation | None:
    if not message.hand_over:
        return None
    if message.HasField("session") or _is_measured(message):
        raise InvalidRequest("hand_over", "neither in a session nor for an embedding or a score")
    if room is None:
        raise InvalidRequest("hand_over", "this worker reserves no KV for other workers")
    return room


def _source_from_pb(message: worker_pb2.Submit) -> KvSource | None:
    if message.HasField("source") and (message.HasField("session") or _is_measured(message)):
        raise InvalidRequest("source", "neither in a session nor for an embedding or a score")
    return source_from_pb(message)


def source_from_pb(message: worker_pb2.Submit) -> KvSource | None:
    """Returns the KV source of a submit whose other fields may be invalid. Raises InvalidRequest if the source is invalid."""
    return _kv_source_from_pb(message.source) if message.HasField("source") else None


def _kv_source_from_pb(source: worker_pb2.KvSource) -> KvSource:
    within(len(source.address), limits.MAX_ADDRESS_CHARS, "source.address")
    return KvSource(_room_from_pb(source.room, "source.room"), source.address, source.room.pages)


def _room_from_pb(room: worker_pb2.KvRoom, field: str) -> KvReservation:
    if len(room.secret) != RESERVATION_SECRET_BYTES:
        raise InvalidRequest(f"{field}.secret", f"has {RESERVATION_SECRET_BYTES} bytes")
    if not room.pages:
        raise InvalidRequest(f"{field}.pages", "a room has a page at least")
    return KvReservation(room.room, room.epoch, room.secret)


def _output_from_pb(message: worker_pb2.Submit, prompt_len: int, model: ModelLimits) -> tuple[int, ...]:
    """Returns the checked output that another worker has sampled."""
    output = tuple(message.output_ids)
    if not output:
        return ()
    if message.HasField("session"):
        raise InvalidRequest("output_ids", "not in a session")
    if _is_measured(message):
        raise InvalidRequest("output_ids", "not for an embedding or a score")
    if prompt_len + len(output) > model.context_len:
        raise InvalidRequest("output_ids", f"with the prompt they are more than the context's {model.context_len} tokens")
    if max(output) >= model.vocab_size:
        raise InvalidRequest("output_ids", f"a token id is not below the vocabulary's size, {model.vocab_size}")
    return output


def _prediction_from_pb(message: worker_pb2.Submit, model: ModelLimits) -> NDArray[np.int32]:
    """Returns the checked prediction; empty if the drafter does not use predictions."""
    within(len(message.prediction_ids), limits.MAX_PREDICTION_TOKENS, "prediction_ids")
    prediction = np.array(message.prediction_ids, dtype=np.uint32)
    if len(prediction) and int(prediction.max()) >= model.vocab_size:
        raise InvalidRequest("prediction_ids", f"a token id is not below the vocabulary's size, {model.vocab_size}")
    return prediction.astype(np.int32) if model.reads_predictions else no_tokens()


def _prompt_from_pb(message: worker_pb2.Submit, model: ModelLimits) -> NDArray[np.int32]:
    """Returns the checked prompt as int32[n], n >= 1.

    If the model's limits allow it, a prompt outside of a session is cut, so that the context has space for one output token. In a
    session, only the core has the whole context.
    """
    prompt = _ids_from_pb(message.prompt_ids, model)
    if model.allow_auto_truncate and not message.HasField("session"):
        prompt = prompt[: model.context_len - (0 if _is_measured(message) else 1)]
    return prompt


def _is_measured(message: worker_pb2.Submit) -> bool:
    """Whether the request wants numbers instead of output, so that its prompt may fill the context."""
    return bool(message.sampling.HasField("embedding") or message.sampling.HasField("score"))


def _ids_from_pb(ids: Sequence[int], model: ModelLimits) -> NDArray[np.int32]:
    """Returns checked token ids as int32[n], n >= 1."""
    prompt = np.array(ids, dtype=np.uint32)
    if not len(prompt):
        raise InvalidRequest("prompt_ids", "the prompt is empty")
    if int(prompt.max()) >= model.vocab_size:
        raise InvalidRequest("prompt_ids", f"a token id is not below the vocabulary's size, {model.vocab_size}")
    return prompt.astype(np.int32)


def _session_from_pb(message: worker_pb2.Submit) -> SessionTurn | None:
    if not message.HasField("session"):
        return None
    turn = message.session
    if not turn.session_id:
        raise InvalidRequest("session", "session_id is empty")
    within(len(turn.session_id), limits.MAX_SESSION_ID_CHARS, "session.session_id")
    within(len(turn.parent_request_id), limits.MAX_REQUEST_ID_CHARS, "session.parent_request_id")
    offset = turn.offset if turn.HasField("offset") else -1
    return SessionTurn(turn.session_id, turn.parent_request_id, offset, turn.replace, turn.drop_previous_output)


def refusal_to_pb(message: worker_pb2.Submit, error: InvalidRequest) -> worker_pb2.Finish:
    return worker_pb2.Finish(
        handle=message.handle,
        reason=common_pb2.FINISH_REASON_ABORT,
        error=common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        field=error.field,
        element=error.element,
        message=str(error),  # with the field, for gateways that are older than `field`
        prompt_tokens=len(message.prompt_ids),
    )


def output_to_pb(output: PeerOutput) -> worker_pb2.StepOutput:
    return worker_pb2.StepOutput(
        handles=output.handles,
        counts=output.counts,
        token_ids=output.tokens,
        finishes=[_finish_to_pb(finish) for finish in output.finishes],
        logprobs=[_rows_to_pb(handle, rows) for handle, rows in output.logprobs],
        prompt_logprobs=[_prompt_rows_to_pb(handle, rows) for handle, rows in output.prompt_logprobs],
        predicted_handles=[handle for handle, _ in output.predicted],
        accepted_prediction_tokens=[verified.right_predicted for _, verified in output.predicted],
        rejected_prediction_tokens=[verified.predicted - verified.right_predicted for _, verified in output.predicted],
        ready=[worker_pb2.PagesReady(handle=each.handle, room=_room_to_pb(each.room, each.num_pages)) for each in output.ready],
    )


def _rows_to_pb(handle: int, rows: list[RowLogprobs]) -> worker_pb2.LogprobRows:
    return worker_pb2.LogprobRows(
        handle=handle,
        values=[row.sampled for row in rows],
        k=len(rows[0].top_ids) if rows else 0,
        top_ids=[token for row in rows for token in row.top_ids],
        top_values=[value for row in rows for value in row.top],
        chosen_values=[value for row in rows for value in row.chosen],
    )


def _prompt_rows_to_pb(handle: int, rows: PromptLogprobs) -> worker_pb2.LogprobRows:
    return worker_pb2.LogprobRows(
        handle=handle,
        values=rows.values.tolist(),
        k=rows.top_ids.shape[1],
        top_ids=rows.top_ids.ravel().tolist(),
        top_values=rows.top.ravel().tolist(),
        chosen_values=rows.chosen.ravel().tolist(),
    )


def _finish_to_pb(finish: Finish) -> worker_pb2.Finish:
    pb = worker_pb2.Finish(
        handle=finish.handle,
        reason=int(finish.reason),  # type: ignore[arg-type]
        matched_stop=finish.matched_stop,
        error=int(finish.error),  # type: ignore[arg-type]
        message=worded(finish.field, finish.element, finish.message),
        field=finish.field,
        element=finish.element,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        completion_tokens=finish.completion_tokens,
        queue_ms=int(finish.queue_s * 1000),
        embedding=() if finish.embedding is None else finish.embedding.tolist(),
        label_logprobs=() if finish.label_logprobs is None else finish.label_logprobs.tolist(),
        retractions=finish.retractions,
        verified_rows=finish.verified.rows,
        drafted_tokens=finish.verified.drafted,
        accepted_tokens=finish.verified.accepted,
        cached_device_tokens=finish.cached_from.get(Tier.DEVICE, 0),
        cached_host_tokens=finish.cached_from.get(Tier.HOST, 0),
        cached_storage_tokens=finish.cached_from.get(Tier.STORAGE, 0),
        cached_peer_tokens=finish.cached_from.get(Tier.PEER, 0),
    )
    if finish.room is not None:
        pb.room.CopyFrom(_room_to_pb(finish.room, finish.room_pages))
    if finish.matched_token >= 0:
        pb.matched_token = finish.matched_token
    return pb


def _room_to_pb(room: KvReservation, pages: int) -> worker_pb2.KvRoom:
    return worker_pb2.KvRoom(room=room.number, epoch=room.epoch, secret=room.secret, pages=pages)
