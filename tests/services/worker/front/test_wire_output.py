"""Tests of outputs on the wire: from the core's step output to the messages that gateways read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rootstock_llm.protos import common_pb2, worker_pb2
from rootstock_llm.services.gateway.generation.logprobs import LogprobRow, LogprobTable
from rootstock_llm.services.gateway.generation.routed_experts import RoutedExpertsTable
from rootstock_llm.services.worker.core.contracts.messages import (
    ErrorCode,
    Finish,
    FinishReason,
    PagesReady,
    PeerOutput,
    Verified,
)
from rootstock_llm.services.worker.core.contracts.plan import PromptLogprobs, RowLogprobs
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.front.outbox import output_to_pb, refusal_to_pb
from rootstock_llm.services.worker.front.wire import InvalidRequest, ready_from_pb


def entries_of(rows: worker_pb2.LogprobRows) -> list[LogprobRow]:
    """Returns the logprob entries that a gateway reads from these rows."""
    table = LogprobTable()
    table.extend(rows)
    return list(table.span(0, len(table)))


def test_empty_output_becomes_an_empty_message() -> None:
    assert output_to_pb(PeerOutput(1)) == worker_pb2.StepOutput()


def test_message_has_the_logprobs_of_every_token() -> None:
    rows = [
        RowLogprobs(-0.5, (7, 8), (-0.25, -1.5), (-3.0,)),
        RowLogprobs(-1.0, (9, 7), (-0.125, -2.0), (-4.0,)),
    ]
    message = output_to_pb(PeerOutput(1, handles=[5], counts=[2], tokens=[7, 9], logprobs=[(5, rows)]))
    assert message.logprobs[0].handle == 5
    back = entries_of(message.logprobs[0])
    assert [tuple(map(tuple, entry[1:])) for entry in back] == [(row.top_ids, row.top, row.chosen) for row in rows]
    assert [entry.value for entry in back] == [row.sampled for row in rows]


def test_message_has_the_logprobs_of_a_token_without_top_tokens() -> None:
    message = output_to_pb(PeerOutput(1, logprobs=[(5, [RowLogprobs(-0.5, (), ())])]))
    assert [tuple(map(list, entry[1:])) for entry in entries_of(message.logprobs[0])] == [([], [], [])]


def test_message_has_the_routed_experts_of_every_token() -> None:
    ids = np.arange(24, dtype=np.uint16).reshape(4, 3, 2) * 1000
    message = output_to_pb(PeerOutput(1, routed_experts=[(4, ids[:1]), (5, ids[1:])]))
    assert [routed.handle for routed in message.routed_experts] == [4, 5]
    table = RoutedExpertsTable(6)
    for routed in message.routed_experts:
        table.extend(routed.ids)
    assert len(table) == 4
    assert np.frombuffer(table.client_bytes(0, 24), "<i4").tolist() == ids.ravel().tolist()


def test_message_has_the_prompt_logprobs_of_every_position() -> None:
    values = np.array([-1, -2, -3], dtype=np.float32)
    top_ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    top = -np.arange(6, dtype=np.float32).reshape(3, 2)
    chosen = np.array([[-5], [-6], [-7]], dtype=np.float32)
    message = output_to_pb(PeerOutput(1, prompt_logprobs=[(4, PromptLogprobs(values, top_ids, top, chosen))]))
    back = entries_of(message.prompt_logprobs[0])
    assert message.prompt_logprobs[0].handle == 4
    assert [entry.value for entry in back] == values.tolist()
    assert [list(entry.top_ids) for entry in back] == top_ids.tolist()
    assert [list(entry.top_values) for entry in back] == top.tolist()
    assert [list(entry.chosen_values) for entry in back] == chosen.tolist()


def test_finish_message_has_the_embedding() -> None:
    vector = np.array([0.5, -0.25], dtype=np.float32)
    finish = Finish(FinishReason.EMBEDDED, 1, "r", prompt_tokens=3, cached_tokens=2, embedding=vector)
    pb = output_to_pb(PeerOutput(1, finishes=[finish])).finishes[0]
    assert (pb.reason, list(pb.embedding), pb.prompt_tokens, pb.cached_tokens) == (
        common_pb2.FINISH_REASON_EMBEDDED,
        vector.tolist(),
        3,
        2,
    )


def test_finish_message_has_the_label_logprobs() -> None:
    values = np.array([-0.5, -np.inf], dtype=np.float32)
    finish = Finish(FinishReason.SCORED, 1, "r", prompt_tokens=3, label_logprobs=values)
    pb = output_to_pb(PeerOutput(1, finishes=[finish])).finishes[0]
    assert (pb.reason, list(pb.label_logprobs)) == (common_pb2.FINISH_REASON_SCORED, values.tolist())


def test_finish_message_has_the_cached_tokens_by_tier() -> None:
    finish = Finish(FinishReason.LENGTH, 1, "r", cached_tokens=9, cached_from={Tier.DEVICE: 2, Tier.HOST: 3, Tier.STORAGE: 4})
    pb = output_to_pb(PeerOutput(1, finishes=[finish])).finishes[0]
    assert (pb.cached_tokens, pb.cached_device_tokens, pb.cached_host_tokens, pb.cached_storage_tokens) == (9, 2, 3, 4)
    finish = replace(finish, cached_from={Tier.DEVICE: 2, Tier.PEER: 7})
    assert output_to_pb(PeerOutput(1, finishes=[finish])).finishes[0].cached_peer_tokens == 7


def test_finish_message_of_a_handover_has_the_kv_reservation() -> None:
    reservation = KvReservation((1 << 63) - 1, 5, b"s" * RESERVATION_SECRET_BYTES)
    pb = output_to_pb(
        PeerOutput(1, finishes=[Finish(FinishReason.HANDED_OVER, 1, "r", reservation=reservation, reserved_pages=7)])
    ).finishes[0]
    assert pb.reason == common_pb2.FINISH_REASON_HANDED_OVER
    assert (pb.room.room, pb.room.epoch, pb.room.secret, pb.room.pages) == ((1 << 63) - 1, 5, b"s" * 16, 7)
    bare = output_to_pb(PeerOutput(1, finishes=[Finish(FinishReason.HANDED_OVER, 1, "r")])).finishes[0]
    assert not bare.HasField("room")


def test_message_counts_accepted_and_rejected_prediction_tokens() -> None:
    verified = Verified().and_row(3, 2).and_row(4, 1, True).and_row(2, 2, True)
    pb = output_to_pb(PeerOutput(1, predicted=[(8, verified), (9, Verified())]))
    assert list(pb.predicted_handles) == [8, 9]
    assert (list(pb.accepted_prediction_tokens), list(pb.rejected_prediction_tokens)) == ([3, 0], [3, 0])


def test_pages_ready_message_has_the_kv_reservation() -> None:
    ready = PagesReady(3, KvReservation(9, 5, b"s" * RESERVATION_SECRET_BYTES), 7)
    (pb,) = output_to_pb(PeerOutput(1, ready=[ready])).ready
    assert (pb.handle, pb.room.room, pb.room.epoch, pb.room.secret, pb.room.pages) == (3, 9, 5, b"s" * 16, 7)
    assert ready_from_pb(pb) == ready


def test_finish_message_has_the_matched_regex_and_the_counts_of_retractions_and_drafts() -> None:
    finish = Finish(FinishReason.MATCHED_REGEX, 1, "r", matched_stop="a+", retractions=2, queue_s=0.25, completion_tokens=9)
    finish = replace(finish, verified=Verified().and_row(3, 2).and_row(1, 0))
    pb = output_to_pb(PeerOutput(1, finishes=[finish])).finishes[0]
    assert (pb.reason, pb.matched_stop) == (common_pb2.FINISH_REASON_MATCHED_REGEX, "a+")
    assert (pb.retractions, pb.queue_ms, pb.completion_tokens) == (2, 250, 9)
    assert not (pb.cached_device_tokens or pb.cached_host_tokens or pb.cached_storage_tokens), (
        "a worker with one tier reports no cached tokens by tier"
    )
    assert (pb.verified_rows, pb.drafted_tokens, pb.accepted_tokens) == (2, 4, 2)
    assert not pb.HasField("matched_token") and not pb.embedding


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (InvalidRequest("top_k", "must be positive"), "top_k: must be positive"),
        (InvalidRequest("stop_regex", "is no pattern", 0), "stop_regex[0]: is no pattern"),
    ],
    ids=["a field", "an element"],
)
def test_refusal_message_begins_with_the_field_name_for_older_gateways(refused: InvalidRequest, message: str) -> None:
    finish = refusal_to_pb(worker_pb2.Submit(handle=7, prompt_ids=[1, 2]), refused)
    assert (finish.message, finish.field) == (message, refused.field)
    assert (finish.element if finish.HasField("element") else None) == refused.element
    assert (finish.handle, finish.prompt_tokens, finish.error) == (7, 2, common_pb2.ERROR_CODE_INVALID_ARGUMENT)


def test_error_message_is_unchanged_when_the_error_has_no_field() -> None:
    finish = Finish(FinishReason.ABORT, 1, "r", error=ErrorCode.INVALID_ARGUMENT, message="the prompt is empty")
    pb = output_to_pb(PeerOutput(1, finishes=[finish])).finishes[0]
    assert (pb.message, pb.field) == ("the prompt is empty", "")


def test_finish_message_has_the_error() -> None:
    finish = Finish(FinishReason.ABORT, 1, "r", error=ErrorCode.INVALID_ARGUMENT, message="no", field="grammar")
    pb = output_to_pb(PeerOutput(1, finishes=[finish])).finishes[0]
    assert (pb.reason, pb.error, pb.field, pb.message) == (
        common_pb2.FINISH_REASON_ABORT,
        common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        "grammar",
        "grammar: no",
    )
