"""Tests of StreamOutbox: messages that wait for a slow gateway stream."""

from __future__ import annotations

import asyncio

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.worker.front.outbox import MERGED_BYTES, GatewayStream


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
