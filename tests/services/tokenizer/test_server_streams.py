"""Tests of the EncodeMany stream over gRPC on loopback: each short request gets its own row."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rootstock_llm.protos import tokenizer_pb2 as pb
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.rpc.grpc_server import DRAIN_S, GOING_AWAY
from rootstock_llm.services.tokenizer import server as tokenizer_server
from tests.services.tokenizer.serving import Serving, serving

TEXT = "one and two"
HELLO = json.dumps([{"role": "user", "content": "hello"}]).encode()


def texts(handle: int, text: str = TEXT, **fields: Any) -> pb.EncodeOpen:
    return pb.EncodeOpen(handle=handle, texts=pb.EncodeRequest(texts=[text], **fields))


@contextlib.asynccontextmanager
async def streaming(service: Serving) -> AsyncIterator[Any]:
    call = service.stub.EncodeMany()
    await call.write(pb.EncodeBatch())
    assert await call.read() == pb.EncodedBatch()
    yield call
    call.cancel()


def full_budget(service: Serving) -> contextlib.AbstractAsyncContextManager[None]:
    """Reserves the whole budget of short requests, so that requests wait."""
    return service.servicer._short_budget.share(service.servicer._settings.max_encoding_bytes)


async def working(service: Serving, count: int) -> None:
    while service.metric("in_flight") != count:
        await asyncio.sleep(0.002)


async def rows(call: Any, count: int) -> list[pb.Encoded]:
    found: list[pb.Encoded] = []
    while len(found) < count:
        found += (await call.read()).rows
    return sorted(found, key=lambda row: row.handle)


def test_stream_answers_a_request_like_a_unary_call(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_server, "MESSAGE_BYTES", 64)

    async def run() -> None:
        async with serving(folders["byte_fallback"], max_request_chars=1000) as service, streaming(service) as call:
            batch = pb.EncodeBatch(opens=[texts(handle, f"text {handle}", hash_root=b"12345678") for handle in range(20)])
            batch.opens.add(handle=20, chat=pb.EncodeChatRequest(messages_json=HELLO))
            batch.opens.add(handle=21, texts=pb.EncodeRequest())
            batch.opens.add(handle=22, chat=pb.EncodeChatRequest(messages_json=HELLO, tools_json=b"{}"))
            await call.write(batch)
            found = await rows(call, 23)
            assert [row.handle for row in found] == list(range(23))
            for row, opened in zip(found[:20], batch.opens, strict=False):
                assert row.response == await service.stub.Encode(opened.texts) and not row.code
            assert found[20].response == await service.stub.EncodeChat(batch.opens[20].chat)
            for row, stub in ((found[21], service.stub.Encode), (found[22], service.stub.EncodeChat)):
                opened = batch.opens[row.handle]
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub(opened.texts if opened.HasField("texts") else opened.chat)
                assert (row.code, row.message) == (raised.value.code().value[0], raised.value.details())
                assert not row.HasField("response")

    asyncio.run(run())


def test_stream_cancels_only_the_requests_that_the_gateway_closes(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_ENCODINGS", 3)

    async def run() -> None:
        async with serving(folders["byte_level"]) as service, streaming(service) as call:
            async with full_budget(service):
                await call.write(pb.EncodeBatch(opens=[texts(handle) for handle in (1, 2, 3, 4)]))
                [refused] = await rows(call, 1)
                assert (refused.handle, refused.code) == (4, grpc.StatusCode.ABORTED.value[0])
                await working(service, 3)
                await call.write(pb.EncodeBatch(closes=[1, 3, 99]))
                await working(service, 1)
            assert [row.handle for row in await rows(call, 1)] == [2]
            assert service.metric("requests_total", rpc="Encode", code="CANCELLED") == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    "opens",
    [
        pytest.param([pb.EncodeOpen(handle=1)], id="no request"),
        pytest.param([texts(1), texts(1)], id="handle twice"),
        pytest.param([texts(1, "x" * limits.SHORT_ENCODING_BYTES)], id="long request"),
    ],
)
def test_stream_ends_with_an_error_when_a_message_is_invalid(folders: dict[str, Path], opens: list[pb.EncodeOpen]) -> None:
    async def run() -> None:
        async with serving(folders["byte_level"]) as service, streaming(service) as call:
            await call.write(pb.EncodeBatch(opens=opens))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await call.read():
                    pass
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await working(service, 0)

    asyncio.run(run())


def test_stream_answers_received_requests_when_the_service_stops(folders: dict[str, Path]) -> None:
    async def run() -> None:
        async with serving(folders["byte_level"]) as service, streaming(service) as call:
            async with full_budget(service):
                await call.write(pb.EncodeBatch(opens=[texts(1), texts(2)]))
                await working(service, 2)
                await service.servicer.drain()
                await asyncio.sleep(2 * DRAIN_S)
            assert [row.handle for row in await rows(call, 2)] == [1, 2]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.UNAVAILABLE, GOING_AWAY)

    asyncio.run(run())


def test_stream_cancels_all_requests_when_the_gateway_disconnects(folders: dict[str, Path]) -> None:
    async def run() -> None:
        async with serving(folders["byte_level"]) as service, full_budget(service):
            async with streaming(service) as call:
                await call.write(pb.EncodeBatch(opens=[texts(handle) for handle in range(5)]))
                await working(service, 5)
            await working(service, 0)
            assert service.metric("requests_total", rpc="Encode", code="CANCELLED") == 5

    asyncio.run(run())
