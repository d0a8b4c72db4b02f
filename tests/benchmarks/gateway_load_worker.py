"""python -m tests.benchmarks.gateway_load_worker: a worker without a model. It sends a single token, or one per step.

The worker sends hello and load messages to the gateway and renews its lease in Redis. It decodes only the handle of a request, so
that it uses little of the CPU time that the measured gateway needs.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import redis.asyncio
import uvloop

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.local.ports import HOST
from rootstock_llm.services.shared.index import prefix_index
from rootstock_llm.services.shared.rpc import grpc_server

MODEL = "instant"
VOCAB_SIZE = 152_064
CONTEXT_LEN = 131_072
GENERATION = 7
TOKEN = 5
LOAD_S = 1.0
STEP_S = 0.002
_SUBMITS, _HANDLE = (1 << 3) | 2, 1 << 3  # wire tags of GenerateRequest.submits and Submit.handle


def handles_of(message: bytes) -> Iterator[int]:
    """Yields the handles of the submits in a serialized GenerateRequest without decoding anything else."""
    at = 0
    while at < len(message) and message[at] == _SUBMITS:
        size, at = _varint(message, at + 1)
        assert message[at] == _HANDLE, "a Submit begins with its handle, which is never 0"
        yield _varint(message, at + 1)[0]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the value of a varint and the index after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


class InstantWorker:
    """Implements Worker.Generate without a model.

    Args:
        tokens: output tokens per response. A single token is sent immediately; several are sent one per step.
        step_s: seconds between two steps.
    """

    def __init__(self, name: str, tokens: int = 1, step_s: float = STEP_S) -> None:
        self._tokens = tokens
        self._step_s = step_s
        self._info = worker_pb2.WorkerInfo(
            worker_id=name,
            generation=GENERATION,
            model=MODEL,
            context_len=CONTEXT_LEN,
            vocab_size=VOCAB_SIZE,
            page_size=16,
            num_pages=1 << 20,
            max_running_requests=4096,
            generates=True,
            publishes_index=True,
        )

    async def generate(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        yield worker_pb2.GenerateResponse(hello=self._info)
        responses: asyncio.Queue[worker_pb2.GenerateResponse] = asyncio.Queue()
        running: dict[int, int] = {}  # by handle: number of tokens sent
        kick = asyncio.Event()
        reading = asyncio.create_task(self._read(requests, responses, running, kick))
        stepping = asyncio.create_task(self._step(running, kick, responses))
        telling = asyncio.create_task(self._send_load(responses))
        try:
            while True:
                yield await responses.get()
        finally:
            reading.cancel()
            stepping.cancel()
            telling.cancel()

    async def _read(
        self,
        requests: AsyncIterator[bytes],
        responses: asyncio.Queue[worker_pb2.GenerateResponse],
        running: dict[int, int],
        kick: asyncio.Event,
    ) -> None:
        async for message in requests:
            handles = list(handles_of(message))
            if self._tokens > 1:
                running.update(dict.fromkeys(handles, 0))
                kick.set()
                continue
            step = worker_pb2.StepOutput(handles=handles, counts=[1] * len(handles), token_ids=[TOKEN] * len(handles))
            for handle in handles:
                step.finishes.add(handle=handle, reason=pb.FINISH_REASON_LENGTH, prompt_tokens=1, completion_tokens=1)
            if handles:
                responses.put_nowait(worker_pb2.GenerateResponse(step=step))

    async def _step(
        self, running: dict[int, int], kick: asyncio.Event, responses: asyncio.Queue[worker_pb2.GenerateResponse]
    ) -> None:
        while True:
            kick.clear()
            if not running:
                await kick.wait()
            handles = list(running)
            step = worker_pb2.StepOutput(handles=handles, counts=[1] * len(handles), token_ids=[TOKEN] * len(handles))
            for handle in handles:
                running[handle] += 1
                if running[handle] == self._tokens:
                    del running[handle]
                    step.finishes.add(
                        handle=handle, reason=pb.FINISH_REASON_LENGTH, prompt_tokens=1, completion_tokens=self._tokens
                    )
            responses.put_nowait(worker_pb2.GenerateResponse(step=step))
            await asyncio.sleep(self._step_s)

    @staticmethod
    async def _send_load(responses: asyncio.Queue[worker_pb2.GenerateResponse]) -> None:
        while True:
            load = worker_pb2.WorkerLoad(lease_held=True, index_generation=GENERATION)
            responses.put_nowait(worker_pb2.GenerateResponse(load=load))
            await asyncio.sleep(LOAD_S)


async def serve(name: str, port: int, redis_url: str, tokens: int, step_s: float) -> None:
    worker = InstantWorker(name, tokens, step_s)
    method = grpc.stream_stream_rpc_method_handler(
        worker.generate, response_serializer=worker_pb2.GenerateResponse.SerializeToString
    )
    handler = grpc.method_handlers_generic_handler("rootstock.v1.Worker", {"Generate": method})
    health = grpc_server.HealthService("worker")
    server = await grpc_server.start_server(HOST, port, health, lambda server: server.add_generic_rpc_handlers((handler,)))
    await health.set_ready(True)
    lease = asyncio.create_task(_renew_lease(name, redis_url))
    await grpc_server.stop_signal().wait()
    lease.cancel()
    await server.stop(0)


async def _renew_lease(name: str, redis_url: str) -> None:
    client = redis.asyncio.from_url(redis_url)
    await client.sadd(prefix_index.workers_key(MODEL), name)
    while True:
        await client.set(prefix_index.lease_key(name), GENERATION, ex=prefix_index.LEASE_TTL_S)
        await asyncio.sleep(prefix_index.RENEW_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="instant-0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--tokens", type=int, default=1, help="output tokens per response")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="seconds between two tokens of a response")
    args = parser.parse_args()
    uvloop.run(serve(args.name, args.port, args.redis_url, args.tokens, args.step_s))


if __name__ == "__main__":
    main()
