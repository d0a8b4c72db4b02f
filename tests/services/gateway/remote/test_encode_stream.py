"""Tests of the EncodeMany streams for short requests to tokenizers, with real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from rootstock_llm.protos import tokenizer_pb2, tokenizer_pb2_grpc
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.gateway.remote.tokenizer_replica import HUGE_AT_ONCE, EncodeStream
from rootstock_llm.services.shared import limits
from tests.services.gateway.fakes import ids_of
from tests.services.gateway.remote.test_replicas import Tokenizer, eventually, replicas, running, tokenizer_client


class UnaryTokenizer(Tokenizer):
    """A tokenizer of an older version without streams."""

    async def EncodeMany(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")


class BrokenStreamTokenizer(Tokenizer):
    """A tokenizer whose streams end with an error at their first batch."""

    async def EncodeMany(self, request: Any, context: Any) -> None:
        await context.read()
        await context.write(tokenizer_pb2.EncodedBatch())
        self.batches.append(await context.read())
        await context.abort(grpc.StatusCode.CANCELLED if len(self.batches) % 2 else grpc.StatusCode.INTERNAL, "broken")


@contextlib.asynccontextmanager
async def client_of(*fakes: Tokenizer, timeout_s: float = 10.0) -> AsyncIterator[TokenizerClient]:
    """Yields a client that is connected, with all streams up."""
    async with replicas() as servers:
        client = tokenizer_client(timeout_s)
        async with running(client.run):
            client.set_endpoints({(await servers.start(fake)): True for fake in fakes})
            await eventually(lambda: client.connected() == len(fakes))
            await eventually(lambda: all(_streams(client, fake) for fake in fakes))
            yield client


def _streams(client: TokenizerClient, fake: Tokenizer) -> bool:
    if isinstance(fake, UnaryTokenizer):
        return True
    request = tokenizer_pb2.EncodeRequest(texts=["x"])
    return all(one._stream is not None and one._stream.takes(request) for one in client._replicas.by_address.values())


async def encode(client: TokenizerClient, text: str = "hi") -> list[int]:
    response = await client.encode(tokenizer_pb2.EncodeRequest(request_id="r", texts=[text]))
    return list(response.prompts[0].ids)


def test_encode_stream_sends_concurrent_requests_in_one_message() -> None:
    async def test() -> None:
        fake = Tokenizer()
        async with client_of(fake) as client:
            chat = tokenizer_pb2.EncodeChatRequest(messages_json=b'[{"role": "user", "content": "hi"}]')
            *answers, last = await asyncio.gather(*(encode(client, f"text {i}") for i in range(8)), client.encode_chat(chat))
            assert answers == [ids_of(f"text {i}") for i in range(8)]
            assert list(last.prompts[0].ids) == ids_of("<user>hi")
            assert [len(batch.opens) for batch in fake.batches] == [9]

    asyncio.run(test())


def test_client_sends_a_long_request_in_a_unary_call() -> None:
    async def test() -> None:
        fake = Tokenizer()
        async with client_of(fake) as client:
            long = "x" * limits.SHORT_ENCODING_BYTES
            assert await asyncio.gather(encode(client, long), encode(client)) == [ids_of(long), ids_of("hi")]
            assert [len(batch.opens) for batch in fake.batches] == [1]

    asyncio.run(test())


def test_client_limits_the_number_of_huge_requests_at_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HUGE_ENCODING_BYTES", limits.SHORT_ENCODING_BYTES)
    monkeypatch.setattr(limits, "MAX_ENCODING_WAIT_S", 0.3)

    async def test() -> None:
        fake = Tokenizer()
        async with client_of(fake) as client:
            fake.gate.clear()
            long = "x" * limits.SHORT_ENCODING_BYTES
            asked = [asyncio.create_task(encode(client, long)) for _ in range(3)]
            await eventually(lambda: sum(task.done() for task in asked) == 1)
            assert len(fake.calls) == HUGE_AT_ONCE
            error = next(task.exception() for task in asked if task.done())
            assert isinstance(error, ApiError) and error.status == 503 and client.connected() == 1
            fake.gate.set()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert found.count(ids_of(long)) == HUGE_AT_ONCE
            assert await encode(client, long) == ids_of(long)

    asyncio.run(test())


def test_encode_stream_limits_open_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_ENCODINGS", 2)

    async def test() -> None:
        fake = Tokenizer()
        async with client_of(fake) as client:
            assert await asyncio.gather(*(encode(client) for _ in range(5))) == [ids_of("hi")] * 5
            assert [len(batch.opens) for batch in fake.batches] == [2]

    asyncio.run(test())


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
        (grpc.StatusCode.ABORTED, 503),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_only_the_refused_request_of_an_encode_stream_fails(code: grpc.StatusCode, status: int) -> None:
    async def test() -> None:
        fake = Tokenizer()
        async with client_of(fake) as client:
            fake.failures.append((code, "texts: its words"))
            first, second = await asyncio.gather(encode(client), encode(client), return_exceptions=True)
            assert isinstance(first, ApiError) and first.status == status and second == ids_of("hi")

    asyncio.run(test())


def test_tokenizer_receives_the_cancellation_of_requests_on_an_encode_stream() -> None:
    async def test() -> None:
        fake = Tokenizer()
        async with client_of(fake) as client:
            fake.gate.clear()
            kept, *gone = (asyncio.create_task(encode(client)) for _ in range(3))
            await eventually(lambda: len(fake.calls) == 3)
            for task in gone:
                task.cancel()
            await eventually(lambda: fake.cancelled == 2)
            fake.gate.set()
            assert await kept == ids_of("hi")
            assert await encode(client) == ids_of("hi")
            assert [handle for batch in fake.batches for handle in batch.closes] == [2, 3]

    asyncio.run(test())


def test_client_retries_requests_when_a_stream_breaks() -> None:
    async def test() -> None:
        broken, other = BrokenStreamTokenizer(), Tokenizer()
        async with client_of(broken, other) as client:
            assert await asyncio.gather(*(encode(client, str(i)) for i in range(10))) == [ids_of(str(i)) for i in range(10)]
            assert broken.batches

    asyncio.run(test())


def test_client_uses_unary_calls_when_streams_always_break() -> None:
    async def test() -> None:
        broken = BrokenStreamTokenizer()
        async with client_of(broken) as client:
            assert await encode(client) == ids_of("hi")
            assert len(broken.calls) == 1

    asyncio.run(test())


def test_client_uses_unary_calls_when_a_tokenizer_has_no_streams() -> None:
    async def test() -> None:
        old = UnaryTokenizer()
        async with client_of(old) as client:
            assert await asyncio.gather(*(encode(client) for _ in range(3))) == [ids_of("hi")] * 3
            assert len(old.calls) == 3 and client.connected() == 1

    asyncio.run(test())


def test_replaced_encode_stream_completes_open_requests() -> None:
    async def test() -> None:
        fake = Tokenizer()
        async with client_of(fake) as client:
            fake.gate.clear()
            waiting = asyncio.create_task(encode(client))
            await eventually(lambda: len(fake.calls) == 1)
            [replica] = client._replicas.by_address.values()
            replica.doubt()
            await eventually(lambda: client._replicas.by_address[replica.address]._stream is not None)
            fake.gate.set()
            await eventually(lambda: len(fake.contexts) == 2 and client.connected() == 1)
            assert await waiting == ids_of("hi") and len(fake.calls) == 1
            await eventually(lambda: len(replica._streams) == 1)

    asyncio.run(test())


def test_encode_stream_ends_when_retired_during_the_first_write() -> None:
    """The first write of a grpc.aio call never returns if the call is cancelled during this write."""

    async def test() -> None:
        async with replicas() as servers:
            address = await servers.start(Tokenizer())
            async with grpc.aio.insecure_channel(address) as channel:
                await channel.channel_ready()
                for turns in range(8):
                    stream = EncodeStream(tokenizer_pb2_grpc.TokenizerStub(channel), address, 1.5)
                    running = asyncio.create_task(stream.run())
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    stream.retire()
                    done, _ = await asyncio.wait([running], timeout=60)
                    assert done and running.cancelled(), f"retired after {turns} turns"

    asyncio.run(test())
