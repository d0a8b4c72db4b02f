"""What one message to a worker holds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rootstock.v1 import worker_pb2
from services.gateway.peers.worker_link import MESSAGE_BYTES, WorkerLink
from services.gateway.request.generation import Prompt
from services.gateway.routing.breaker import CircuitBreaker
from services.shared.limits import MAX_MESSAGE_BYTES

PROMPT = [150_000] * 40_000
BURST = 120  # of some 120 kB each


def test_a_burst_of_long_prompts_goes_out_in_messages_that_grpc_takes() -> None:
    async def run() -> list[worker_pb2.GenerateRequest]:
        choice: Any = SimpleNamespace(prompt=Prompt(PROMPT, None), output_ids=[], trace=None)
        link = WorkerLink("127.0.0.1:1", choice, 5.0, CircuitBreaker())
        for handle in range(BURST):
            link.submit(choice, worker_pb2.Submit(handle=handle))
        link.abort(3)
        messages = []
        while link._submits or link._aborts:
            messages.append(link._next_message())
        return messages

    messages = asyncio.run(run())
    assert [s.handle for m in messages for s in m.submits] == [h for h in range(BURST) if h != 3]
    assert sum(m.ByteSize() for m in messages) > 3 * MESSAGE_BYTES
    assert max(m.ByteSize() for m in messages) < 2 * MESSAGE_BYTES < MAX_MESSAGE_BYTES
