"""Tests of StreamOutbox: messages that wait for a slow gateway stream."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, PeerOutput
from rootstock_llm.services.worker.front import outbox
from rootstock_llm.services.worker.front.outbox import MERGED_BYTES, GatewayStream, parts_of


def messages_of(steps: list[worker_pb2.StepOutput]) -> list[worker_pb2.StepOutput]:
    """Returns the messages of a gateway stream that is not read until the last of these steps is sent."""

    async def take() -> list[worker_pb2.StepOutput]:
        stream, messages = GatewayStream(), []
        for step in steps:
            stream.put(step)
        stream.end()
        while (message := await stream.take()) is not None:
            messages.append(message.step)
        return messages

    return asyncio.run(take())


def test_outputs_of_waiting_steps_are_merged_in_order_into_messages_of_bounded_size() -> None:
    def step(number: int, values: int) -> worker_pb2.StepOutput:
        row = worker_pb2.LogprobRows(handle=number, values=[0.5] * values)
        return worker_pb2.StepOutput(handles=[number], counts=[1], token_ids=[number], prompt_logprobs=[row])

    small = messages_of([step(number, 1) for number in range(200)])
    assert len(small) == 1 and list(small[0].token_ids) == [*range(200)]

    medium = messages_of([step(number, MERGED_BYTES // 64) for number in range(100)])
    assert all(MERGED_BYTES // 2 < message.ByteSize() <= MERGED_BYTES for message in medium[:-1]) and len(medium) == 7

    sizes = [MERGED_BYTES // 16, MERGED_BYTES // 2, 1, 1]  # values per step, in turn; a step of the second size is not merged
    large = messages_of([step(number, sizes[number % 4]) for number in range(80)])
    assert [token for message in large for token in message.token_ids] == [*range(80)]
    assert [row.handle for message in large for row in message.prompt_logprobs] == [*range(80)]
    assert max(message.ByteSize() for message in large) < 2.5 * MERGED_BYTES, "one large step, or as many small steps as fit"
    unmerged = [message for message in large if message.ByteSize() > MERGED_BYTES]
    assert [len(message.handles) for message in unmerged] == [1] * 20
    assert len(large) == 41, "20 large steps, and one message for the small steps before, between and after them"


def test_outputs_after_a_sent_message_form_a_new_message() -> None:
    async def take() -> list[list[int]]:
        stream = GatewayStream()
        stream.put(worker_pb2.StepOutput(token_ids=[1]))
        stream.put(worker_pb2.StepOutput(token_ids=[2]))
        first = await stream.take()
        stream.put(worker_pb2.StepOutput(token_ids=[3]))
        second = await stream.take()
        assert first is not None and second is not None
        return [list(first.step.token_ids), list(second.step.token_ids)]

    assert asyncio.run(take()) == [[1, 2], [3]]


def test_output_with_many_routed_experts_is_split_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC limits the size of a message. Each request's tokens, experts and end are in one message."""
    monkeypatch.setattr(outbox, "EXPERT_BYTES", 100)
    output = PeerOutput(3, handles=[7, 8, 9, 5], counts=[1, 2, 1, 1], tokens=[70, 80, 81, 90, 50])
    # Requests 7, 8 and 9 have 60, 60 and 90 bytes of experts, and request 5 has none.
    sizes = [(7, 60), (8, 30), (9, 90), (8, 30)]
    output.routed_experts = [(handle, np.full((size // 2, 1, 1), handle, np.uint16)) for handle, size in sizes]
    output.finishes = [Finish(FinishReason.LENGTH, handle) for handle in (5, 9)]
    output.predicted = [(8, object())]  # type: ignore[list-item]

    parts = parts_of(output)
    assert [(part.handles, part.counts, part.tokens) for part in parts] == [
        ([7, 5], [1, 1], [70, 50]),
        ([8], [2], [80, 81]),
        ([9], [1], [90]),
    ]
    assert [[(handle, ids.nbytes) for handle, ids in part.routed_experts] for part in parts] == [
        [(7, 60)],
        [(8, 30), (8, 30)],
        [(9, 90)],
    ]
    assert [[finish.handle for finish in part.finishes] for part in parts] == [[5], [], [9]]
    assert [len(part.predicted) for part in parts] == [0, 1, 0] and {part.peer for part in parts} == {3}
    monkeypatch.setattr(outbox, "EXPERT_BYTES", 210)
    assert parts_of(output) == [output]


def test_parts_have_every_column_of_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "EXPERT_BYTES", 1)  # each request is in a part of its own
    output = PeerOutput(1)
    names = [field.name for field in fields(PeerOutput) if field.name != "peer"]
    for name in names:
        value: list[Any] = [(handle, np.full((1, 1, 1), handle, np.uint16)) for handle in (1, 2)]
        value = [1, 2] if name == "handles" else [1, 1] if name == "counts" else [10, 20] if name == "tokens" else value
        value = [Finish(FinishReason.LENGTH, handle) for handle in (1, 2)] if name == "finishes" else value
        setattr(output, name, value)
    parts = parts_of(output)
    assert len(parts) == 2
    for name in names:
        assert [*getattr(parts[0], name), *getattr(parts[1], name)] == getattr(output, name), name
