"""Tests of the messages that a WorkerLink sends to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rootstock_llm.protos import common_pb2, worker_pb2
from rootstock_llm.services.gateway.remote.connection import Patience
from rootstock_llm.services.gateway.remote.worker_link import MESSAGE_BYTES, WorkerLink
from rootstock_llm.services.gateway.routing.breaker import CircuitBreaker
from rootstock_llm.services.shared.limits import MAX_MESSAGE_BYTES

PROMPT = [150_000] * 40_000  # token ids of three bytes each on the wire
BURST = 120  # prompts of about 120 kB each


class FakeChoice:
    prompt_ids: Sequence[int] = PROMPT
    prediction_ids: Sequence[int] = ()
    token_ids: Sequence[int] = PROMPT
    num_tokens = len(PROMPT)

    def write_sampling(self, into: common_pb2.SamplingParams, ends_with_prompt: bool) -> None:
        into.max_new_tokens = 7

    def aborted(self, handle: int) -> None: ...

    def lost(self, handle: int, was_sent: bool) -> None: ...


def test_worker_link_splits_a_burst_of_long_prompts_into_messages() -> None:
    async def run() -> list[worker_pb2.GenerateRequest]:
        choice: Any = FakeChoice()
        link: WorkerLink[FakeChoice] = WorkerLink("127.0.0.1:1", choice, Patience(5.0, 0.0), CircuitBreaker())
        for handle in range(BURST):
            link.submit(choice, worker_pb2.Submit(handle=handle))
        link.abort(3)
        messages = []
        while link._submits or link._aborts:
            messages.append(link._next_message())
        return messages

    messages = asyncio.run(run())
    assert [s.handle for m in messages for s in m.submits] == [h for h in range(BURST) if h != 3]
    assert {(s.sampling.max_new_tokens, len(s.prompt_ids)) for m in messages for s in m.submits} == {(7, len(PROMPT))}
    assert sum(m.ByteSize() for m in messages) > 3 * MESSAGE_BYTES
    assert max(m.ByteSize() for m in messages) < 2 * MESSAGE_BYTES < MAX_MESSAGE_BYTES


@pytest.mark.parametrize("sent", ["prefetch", "submit", "nothing"])
def test_abort_of_a_submit_also_ends_the_prefetch(sent: str) -> None:
    async def run() -> None:
        choice: Any = FakeChoice()
        link: WorkerLink[FakeChoice] = WorkerLink("127.0.0.1:1", choice, Patience(5.0, 0.0), CircuitBreaker())
        link.prefetch(choice, worker_pb2.Prefetch(handle=7))
        assert (link.num_prefetches, link.prefetch_tokens) == (1, len(PROMPT))
        if sent != "nothing":
            assert [each.handle for each in link._next_message().prefetches] == [7]
        link.submit(choice, worker_pb2.Submit(handle=7))
        assert (link.num_prefetches, link.prefetch_tokens) == (0, 0)
        if sent == "submit":
            assert [each.handle for each in link._next_message().submits] == [7]
        assert link.abort(7) is (sent != "submit"), "abort() returns whether the submit was not sent yet"
        message = link._next_message()
        assert list(message.aborts) == ([] if sent == "nothing" else [7]) and not message.submits and not message.prefetches

    asyncio.run(run())
