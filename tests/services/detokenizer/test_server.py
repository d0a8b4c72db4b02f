"""Tests of the Detokenizer service over gRPC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from rootstock_llm.protos import detokenizer_pb2 as pb
from rootstock_llm.protos import detokenizer_pb2_grpc as pb_grpc
from rootstock_llm.services.detokenizer.server import DetokenizerServicer
from rootstock_llm.services.detokenizer.session import DetokenizerMetrics
from rootstock_llm.services.detokenizer.settings import DetokenizerSettings
from rootstock_llm.services.detokenizer.text import TokenTexts
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.shared.observe.spans import Tracing
from rootstock_llm.services.shared.rpc import grpc_server


@contextlib.asynccontextmanager
async def serving(
    tokenizer: HfTokenizer, tracing: Tracing | None = None, **settings: int | str
) -> AsyncIterator[tuple[pb_grpc.DetokenizerStub, DetokenizerServicer, CollectorRegistry]]:
    registry = CollectorRegistry()
    config = DetokenizerSettings(model=Path("."), **settings)  # type: ignore[arg-type]
    servicer = DetokenizerServicer(tokenizer, config, DetokenizerMetrics(registry), tracing)
    server = grpc.aio.server(options=grpc_server.SERVER_OPTIONS)
    pb_grpc.add_DetokenizerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.DetokenizerStub(channel), servicer, registry  # type: ignore[no-untyped-call]
    await server.stop(None)


def row(
    handle: int, ids: list[int], finished: bool = False, seq: int = 0, opens: list[pb.DecodeOpen] | None = None
) -> pb.DecodeBatch:
    return pb.DecodeBatch(
        seq=seq, opens=opens or [], handles=[handle], counts=[len(ids)], token_ids=ids, finished=[finished], matched_stops=[""]
    )


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("inline_tokens", [0, 2048], ids=["in a thread", "on the loop"])
def test_stream_returns_one_response_per_batch_in_order(tokenizers: dict[str, HfTokenizer], inline_tokens: int) -> None:
    async def run() -> None:
        tokenizer = tokenizers["byte_level"]
        ids = tokenizer.encode_batch(["hello 你好 there"], False)[0]
        async with serving(tokenizer, inline_tokens=inline_tokens) as (stub, _, registry):
            call = stub.Decode()
            await call.write(pb.DecodeBatch(seq=100, opens=[pb.DecodeOpen(handle=5)]))
            for seq, token_id in enumerate(ids):
                await call.write(row(5, [token_id], seq=seq))
            await call.write(row(5, [], finished=True, seq=200))
            await call.done_writing()
            answers = [answer async for answer in call]
            assert [a.seq for a in answers] == [100, *range(len(ids)), 200]
            assert "".join(text for a in answers for text in a.texts) == "hello 你好 there"
            assert registry.get_sample_value("rootstock_detokenizer_tokens_total") == len(ids)
            assert registry.get_sample_value("rootstock_detokenizer_open_requests") == 0

    asyncio.run(run())


def test_open_requests_are_freed_when_the_stream_is_cancelled(tokenizers: dict[str, HfTokenizer]) -> None:
    async def run() -> None:
        async with serving(tokenizers["byte_level"]) as (stub, _, registry):
            call = stub.Decode()
            await call.write(row(1, [10], opens=[pb.DecodeOpen(handle=1), pb.DecodeOpen(handle=2)]))
            await call.read()
            assert registry.get_sample_value("rootstock_detokenizer_open_requests") == 2
            call.cancel()
            other = stub.Decode()
            await other.write(row(1, [10]))
            assert list((await other.read()).unknown) == [1]
            async with asyncio.timeout(60):
                while registry.get_sample_value("rootstock_detokenizer_open_requests") != 0:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (pb.DecodeBatch(handles=[1]), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.DecodeBatch(opens=[pb.DecodeOpen(handle=h) for h in range(3)]), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_stream_ends_with_an_error_when_a_batch_is_invalid_or_exceeds_a_limit(
    tokenizers: dict[str, HfTokenizer], message: pb.DecodeBatch, code: grpc.StatusCode
) -> None:
    async def run() -> None:
        async with serving(tokenizers["byte_level"], max_open_requests=2) as (stub, _, _registry):
            call = stub.Decode()
            await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() == code

    asyncio.run(run())


def test_idle_stream_ends_with_unavailable_when_the_service_drains(tokenizers: dict[str, HfTokenizer]) -> None:
    async def run() -> None:
        async with serving(tokenizers["byte_level"]) as (stub, servicer, _):
            call = stub.Decode()
            await call.write(row(1, [10], opens=[pb.DecodeOpen(handle=1)]))
            await call.read()
            await servicer.drain()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_drain_answers_batches_in_transit(tokenizers: dict[str, HfTokenizer]) -> None:
    async def run() -> None:
        async with serving(tokenizers["byte_level"], inline_tokens=0) as (stub, servicer, registry):
            call = stub.Decode()
            await call.write(row(1, [10], opens=[pb.DecodeOpen(handle=1)]))
            await call.read()
            for seq in range(1, 6):
                await call.write(row(1, [10], seq=seq))
            await servicer.drain()
            seqs = []
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while True:
                    seqs.append((await call.read()).seq)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
            assert seqs == [1, 2, 3, 4, 5]
            async with asyncio.timeout(60):  # the client sees the end of the stream before the server closes the session
                while registry.get_sample_value("rootstock_detokenizer_open_requests"):
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_drain_ends_busy_streams_and_refuses_new_streams(tokenizers: dict[str, HfTokenizer]) -> None:
    async def run() -> None:
        async with serving(tokenizers["byte_level"]) as (stub, servicer, _):
            call = stub.Decode()
            await call.write(row(1, [10], opens=[pb.DecodeOpen(handle=1)]))
            await call.read()
            await servicer.drain()
            with pytest.raises(grpc.aio.AioRpcError):
                async with asyncio.timeout(60):
                    while True:
                        await call.write(row(1, [10]))
                        await call.read()
            # INTERNAL: the client wrote after the end of the stream, before the status reached it.
            assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
            late = stub.Decode()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await late.read()
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
            assert (await stub.TokenTexts(pb.TokenTextsRequest(token_ids=[10]))).texts, "unary calls are still answered"

    asyncio.run(run())


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("inline_tokens", [0, 2048], ids=["in a thread", "on the loop"])
def test_token_texts_call_returns_one_text_per_id_and_refuses_too_many_ids(
    tokenizers: dict[str, HfTokenizer], inline_tokens: int
) -> None:
    async def run() -> None:
        tokenizer = tokenizers["byte_level"]
        async with serving(tokenizer, inline_tokens=inline_tokens) as (stub, _, _):
            answer = await stub.TokenTexts(pb.TokenTextsRequest(token_ids=[5, 6, 5]))
            texts = TokenTexts(tokenizer)
            assert list(answer.texts) == [texts.of(5), texts.of(6), texts.of(5)]
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.TokenTexts(pb.TokenTextsRequest(token_ids=[1] * (limits.MAX_TOKEN_TEXTS + 1)))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_info_call_returns_the_served_model_name(tokenizers: dict[str, HfTokenizer]) -> None:
    async def run() -> None:
        async with serving(tokenizers["byte_level"], served_model_name="llama") as (stub, _, _registry):
            assert (await stub.Info(pb.DetokenizerInfoRequest())).model == "llama"

    asyncio.run(run())


def test_stream_continues_when_the_connection_reaches_maximum_age(tokenizers: dict[str, HfTokenizer]) -> None:
    async def run() -> None:
        config = DetokenizerSettings(model=Path("."))
        servicer = DetokenizerServicer(tokenizers["byte_level"], config, DetokenizerMetrics(CollectorRegistry()))
        ports: list[int] = []

        def add(server: grpc.aio.Server) -> None:
            pb_grpc.add_DetokenizerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
            ports.append(server.add_insecure_port("127.0.0.1:0"))

        server = await grpc_server.start_server(
            "127.0.0.1", 0, grpc_server.HealthService("detokenizer"), add, max_connection_age_s=0.3
        )
        try:
            async with grpc_server.channel(f"127.0.0.1:{ports[0]}") as channel:
                call = pb_grpc.DetokenizerStub(channel).Decode()  # type: ignore[no-untyped-call]
                await call.write(row(1, [10], opens=[pb.DecodeOpen(handle=1)]))
                await call.read()
                async with asyncio.timeout(60):
                    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                await call.write(row(1, [10], seq=7))
                assert (await call.read()).seq == 7
                call.cancel()
        finally:
            await server.stop(None)

    asyncio.run(run())
