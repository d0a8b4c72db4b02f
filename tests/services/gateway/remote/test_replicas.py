"""Tests of the pools of tokenizers and detokenizers with changing replicas and models, with real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from rootstock_llm.protos import detokenizer_pb2, detokenizer_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from rootstock_llm.services.gateway.generation.decoding import Decoding
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.request import ModelInfo
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.remote import detokenizer_link, tokenizer_replica
from rootstock_llm.services.gateway.remote.connection import Patience
from rootstock_llm.services.gateway.remote.detokenizer_link import DetokPool
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.tokenizer.refusal import Refusal
from tests.services.gateway.fakes import FakeDetokenizer, FakeTokenizer, ids_of

WAIT_S = 10.0


def model_info(name: str = "", tokenizer: str = "") -> ModelInfo:
    return ModelInfo(name, 0, 0, source=name, tokenizer=tokenizer)


class Detokenizer(FakeDetokenizer):
    def __init__(self, model: str = "") -> None:
        super().__init__()
        self.model = model

    async def Info(self, request: Any, context: Any) -> detokenizer_pb2.DetokenizerInfo:
        return detokenizer_pb2.DetokenizerInfo(model=self.model)


class Tokenizer(FakeTokenizer):
    """A tokenizer that answers neither calls nor Info while `gate` is closed."""

    def __init__(self, model: str = "") -> None:
        super().__init__()
        self.model = model

    async def Info(self, request: Any, context: Any) -> tokenizer_pb2.TokenizerInfo:
        await self.gate.wait()
        return tokenizer_pb2.TokenizerInfo(model=self.model)


class Leaving(Tokenizer):
    """A stopping tokenizer, which refuses all calls."""

    async def _begin(self, request: Any) -> None:
        await super()._begin(request)
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "leaving")

    async def Info(self, request: Any, context: Any) -> tokenizer_pb2.TokenizerInfo:
        if self.calls:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "leaving")
        return await super().Info(request, context)


class Replicas:
    """gRPC servers on the loopback interface."""

    def __init__(self) -> None:
        self.servers: dict[str, grpc.aio.Server] = {}

    async def start(self, servicer: Any) -> str:
        server = grpc.aio.server(options=grpc_server.SERVER_OPTIONS)
        if isinstance(servicer, Detokenizer):
            detokenizer_pb2_grpc.add_DetokenizerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        else:
            tokenizer_pb2_grpc.add_TokenizerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self.servers[address] = server
        return address

    async def stop(self, address: str) -> None:
        await self.servers.pop(address).stop(None)


@contextlib.asynccontextmanager
async def replicas() -> AsyncIterator[Replicas]:
    running = Replicas()
    try:
        yield running
    finally:
        for address in list(running.servers):
            await running.stop(address)


@contextlib.asynccontextmanager
async def running(run: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])


def detok_pool(wait_s: float = WAIT_S, silence_s: float = WAIT_S) -> DetokPool:
    metrics = GatewayMetrics(CollectorRegistry())
    return DetokPool((), wait_s, 1, itertools.count(1), metrics, lambda: None, Patience(silence_s, 0.0))


def tokenizer_client(timeout_s: float = WAIT_S, wait_s: float = WAIT_S) -> TokenizerClient:
    return TokenizerClient((), timeout_s, wait_s, 0.0, 1, GatewayMetrics(CollectorRegistry()), lambda: None)


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.002)


class Answer:
    """A decoding with its received text."""

    def __init__(self, pool: DetokPool, model: str = "", stop: Sequence[str] = ()) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.error: ApiError | None = None
        self.decoding = Decoding(self, "r", self.ids, model=model, stop=stop)
        self._pool = pool

    def on_text(self, text: str, count: int) -> None:
        self.text += text

    def on_decode_failed(self, error: ApiError) -> None:
        self.error = error

    def add(self, text: str, finish: bool = False) -> None:
        self.ids += ids_of(text)
        if finish:
            self.decoding.finish("")
        self._pool.touch(self.decoding)

    @property
    def address(self) -> str:
        return next((link.address for link in self._pool.links if link.window is self.decoding.stream), "")


class TestDetokenizers:
    def test_pool_uses_a_new_detokenizer_at_once(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                pool = detok_pool()
                async with running(pool.run):
                    waiting = Answer(pool)
                    waiting.add("hello")
                    first = await servers.start(Detokenizer())
                    pool.set_endpoints({first: True})
                    await eventually(lambda: waiting.text == "hello")
                    second = await servers.start(Detokenizer())
                    pool.set_endpoints({first: True, second: True})
                    await eventually(lambda: pool.connected() == 2)
                    later = [Answer(pool) for _ in range(3)]
                    for answer in later:
                        answer.add("x")
                    assert [answer.address for answer in later].count(second) == 2

        asyncio.run(test())

    def test_link_to_a_removed_detokenizer_is_closed_after_the_last_decoding(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                old, new = await servers.start(Detokenizer()), await servers.start(Detokenizer())
                pool = detok_pool()
                async with running(pool.run):
                    pool.set_endpoints({old: True})
                    await eventually(lambda: pool.connected() == 1)
                    kept, dropped = Answer(pool), Answer(pool)
                    kept.add("ab")
                    dropped.add("x")
                    await eventually(lambda: kept.text == "ab")
                    pool.set_endpoints({new: True})
                    await eventually(lambda: pool.connected() == 1)
                    fresh = Answer(pool)
                    fresh.add("y")
                    assert fresh.address == new and kept.address == dropped.address == old
                    kept.add("cd", finish=True)
                    await eventually(lambda: kept.text == "abcd")
                    assert len(pool.links) == 2
                    pool.drop(dropped.decoding)
                    assert [link.address for link in pool.links] == [new]
                    pool.set_endpoints({})
                    fresh.add("z", finish=True)
                    await eventually(lambda: fresh.text == "yz" and not pool.links)
                    assert not pool._replicas._tasks

        asyncio.run(test())

    def test_pool_moves_decodings_when_the_stream_of_a_removed_detokenizer_breaks(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                old, new = await servers.start(Detokenizer()), await servers.start(Detokenizer())
                pool = detok_pool()
                async with running(pool.run):
                    pool.set_endpoints({old: True})
                    await eventually(lambda: pool.connected() == 1)
                    answer = Answer(pool)
                    answer.add("ab")
                    await eventually(lambda: answer.text == "ab")
                    pool.set_endpoints({new: True})
                    await eventually(lambda: pool.connected() == 1)
                    await servers.stop(old)
                    await eventually(lambda: answer.address == new and len(pool.links) == 1)
                    answer.add("cd", finish=True)
                    await eventually(lambda: answer.decoding.done)
                    assert answer.text == "abcd"

        asyncio.run(test())

    def test_link_to_a_detokenizer_continues_when_the_removed_endpoint_returns(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                address = await servers.start(Detokenizer())
                pool = detok_pool()
                async with running(pool.run):
                    pool.set_endpoints({address: True})
                    await eventually(lambda: pool.connected() == 1)
                    answer = Answer(pool)
                    answer.add("ab")
                    [link] = pool.links
                    pool.set_endpoints({})
                    assert pool.connected() == 0
                    pool.set_endpoints({address: True})
                    answer.add("cd", finish=True)
                    await eventually(lambda: answer.text == "abcd")
                    assert pool.links == [link] and pool.connected() == 1

        asyncio.run(test())

    def test_pool_sends_no_new_decodings_to_an_unready_detokenizer(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                address = await servers.start(Detokenizer())
                pool = detok_pool()
                async with running(pool.run):
                    pool.set_endpoints({address: True})
                    await eventually(lambda: pool.connected() == 1)
                    before, after = Answer(pool), Answer(pool)
                    before.add("a")
                    pool.set_endpoints({address: False})
                    after.add("x")
                    before.add("b")
                    await eventually(lambda: before.text == "ab")
                    assert pool.connected() == 0 and after.decoding.stream is None
                    pool.set_endpoints({address: True})
                    await eventually(lambda: after.text == "x")

        asyncio.run(test())

    def test_pool_moves_decodings_from_a_silent_detokenizer(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                silent, other = Detokenizer(), Detokenizer()
                address = await servers.start(silent)
                pool = detok_pool(silence_s=0.2)
                async with running(pool.run):
                    pool.set_endpoints({address: True})
                    await eventually(lambda: pool.connected() == 1)
                    answer = Answer(pool)
                    answer.add("ab")
                    await eventually(lambda: answer.text == "ab")
                    await asyncio.sleep(0.5)
                    assert pool.connected() == 1, "a detokenizer without unanswered batches may be silent"
                    silent.gate.clear()
                    answer.add("cd")
                    elsewhere = await servers.start(other)
                    pool.set_endpoints({address: True, elsewhere: True})
                    await eventually(lambda: answer.text == "abcd" and answer.address == elsewhere)
                    assert pool.connected() == 1
                    silent.gate.set()
                    await eventually(lambda: pool.connected() == 2)

        asyncio.run(test())

    def test_pool_sends_each_decoding_to_a_detokenizer_of_the_requested_model(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                second = Detokenizer("two")
                one, two = await servers.start(Detokenizer("one")), await servers.start(second)
                pool = detok_pool(wait_s=2.0)
                async with running(pool.run):
                    pool.set_endpoints({one: True})
                    await eventually(lambda: pool.connected("one") == 1)
                    assert (pool.connected(), pool.connected("two")) == (1, 0)
                    answers = {model: Answer(pool, model) for model in ("one", "two", "", "three")}
                    for answer in answers.values():
                        answer.add("x")
                    await asyncio.sleep(0.2)
                    pool.set_endpoints({one: True, two: True})
                    await eventually(lambda: all(answers[model].text == "x" for model in ("one", "two", "")))
                    assert answers["one"].address == one and answers["two"].address == two
                    await eventually(lambda: answers["three"].error is not None)
                    texts = TokenTexts(pool.stubs, 0.1, 1)
                    assert await texts.of_model(model_info("two", "v1")).of([ord("a")]) == {ord("a"): b"a"}
                    with pytest.raises(ApiError):
                        await texts.of_model(model_info("three", "v1")).of([ord("a")])
                    texts = TokenTexts(pool.stubs, WAIT_S, 1)
                    assert await texts.of_model(model_info("two", "v1")).of([7]) == {7: b"\x07"}
                    second.bytes_of[7] = b"new"
                    assert await texts.of_model(model_info("two", "v1")).of([7]) == {7: b"\x07"}
                    assert await texts.of_model(model_info("two", "v2")).of([7]) == {7: b"new"}, (
                        "token texts of the other model version"
                    )

        asyncio.run(test())

    def test_request_for_token_texts_moves_to_another_detokenizer_when_the_endpoint_is_removed(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                fakes = {await servers.start(fake): fake for fake in (Detokenizer(), Detokenizer())}
                pool = detok_pool()
                texts = TokenTexts(pool.stubs, WAIT_S, 1)
                for fake in fakes.values():
                    fake.text_gate.clear()
                async with running(pool.run):
                    pool.set_endpoints(dict.fromkeys(fakes, True))
                    await eventually(lambda: pool.connected() == 2)
                    asking = asyncio.create_task(texts.of_model(model_info("", "")).of([ord("a")]))
                    await eventually(lambda: any(fake.text_calls for fake in fakes.values()))
                    (other,) = [address for address, fake in fakes.items() if not fake.text_calls]
                    pool.set_endpoints({other: True})
                    fakes[other].text_gate.set()
                    assert await asking == {ord("a"): b"a"}

        asyncio.run(test())

    def test_replays_of_many_decodings_are_split_into_several_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(detokenizer_link, "MAX_BATCH_IDS", 100)

        async def test() -> None:
            async with replicas() as servers:
                old, fake = await servers.start(Detokenizer()), Detokenizer()
                pool = detok_pool()
                async with running(pool.run):
                    pool.set_endpoints({old: True})
                    await eventually(lambda: pool.connected() == 1)
                    answers = [Answer(pool, stop=["?" * 30]) for _ in range(20)]
                    text = "abcdefghij" * 3
                    for answer in answers:
                        answer.add(text)
                    await eventually(lambda: all(answer.text == text for answer in answers))
                    answers[0].add(text * 5)  # larger than one batch
                    pool.set_endpoints({old: True, (await servers.start(fake)): True})
                    await eventually(lambda: pool.connected() == 2)
                    await servers.stop(old)
                    await eventually(lambda: len(fake.open) == 20)
                    for answer in answers:
                        answer.add("!", finish=True)
                    await eventually(lambda: all(answer.decoding.done for answer in answers))
                    assert [answer.text for answer in answers] == [text * 6 + "!"] + [text + "!"] * 19
                    replayed = [sum(len(opened.replay_ids) for opened in batch.opens) for batch in fake.batches]
                    assert sum(map(bool, replayed)) >= 6 and max(replayed[1:]) <= 100
                    stops = [sum(len(stop) for opened in batch.opens for stop in opened.stop) for batch in fake.batches]
                    assert sum(stops) == 600 and max(map(sum, zip(replayed[2:], stops[2:], strict=True))) <= 100

        asyncio.run(test())


async def encode(client: TokenizerClient, text: str = "hi", model: str = "") -> list[int]:
    response = await client.encode(tokenizer_pb2.EncodeRequest(texts=[text]), model=model)
    return list(response.prompts[0].ids)


async def begin_unanswered(client: TokenizerClient, address: str, tokenizer: Tokenizer) -> asyncio.Task[list[int]]:
    """Starts a call that the only tokenizer has received and does not answer."""
    client.set_endpoints({address: True})
    await eventually(lambda: client.connected() == 1)
    tokenizer.gate.clear()
    call = asyncio.create_task(encode(client))
    await eventually(lambda: len(tokenizer.calls) == 1)
    return call


class TestTokenizers:
    def test_client_distributes_calls_round_robin(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                fakes = [Tokenizer() for _ in range(3)]
                addresses = [await servers.start(fake) for fake in fakes]
                client = tokenizer_client()
                async with running(client.run):
                    waiting = asyncio.create_task(encode(client))
                    client.set_endpoints({addresses[0]: True})
                    assert await waiting == ids_of("hi")
                    client.set_endpoints({addresses[0]: True, addresses[1]: True, addresses[2]: False})
                    await eventually(lambda: client.connected() == 2)
                    for fake in fakes:
                        fake.calls.clear()
                    for _ in range(6):
                        await encode(client)
                    assert [len(fake.calls) for fake in fakes] == [3, 3, 0]

        asyncio.run(test())

    def test_channel_to_a_removed_tokenizer_is_closed_after_the_last_call(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                old, new = Tokenizer(), Tokenizer()
                removed, other = await servers.start(old), await servers.start(new)
                client = tokenizer_client()
                async with running(client.run):
                    call = await begin_unanswered(client, removed, old)
                    client.set_endpoints({other: True})
                    assert await encode(client) == ids_of("hi") and len(new.calls) == 1
                    assert set(client._replicas.by_address) == {removed, other}
                    old.gate.set()
                    assert await call == ids_of("hi")
                    assert set(client._replicas.by_address) == {other}
                    await eventually(lambda: len(client._replicas._tasks) == 1)

        asyncio.run(test())

    def test_call_at_a_removed_silent_tokenizer_moves_to_a_new_tokenizer(self) -> None:
        """The channel of the removed tokenizer is closed after its last call."""

        async def test() -> None:
            async with replicas() as servers:
                old = Tokenizer()
                removed, added = await servers.start(old), await servers.start(Tokenizer())
                client = tokenizer_client(timeout_s=0.5)
                async with running(client.run):
                    call = await begin_unanswered(client, removed, old)
                    client.set_endpoints({})
                    await eventually(lambda: not client._replicas._tasks)
                    client.set_endpoints({added: True})
                    assert await call == ids_of("hi")

        asyncio.run(test())

    def test_client_avoids_a_silent_tokenizer_until_a_response(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                silent, other = Tokenizer(), Tokenizer()
                addresses = [await servers.start(silent), await servers.start(other)]
                client = tokenizer_client(timeout_s=2.0)
                async with running(client.run):
                    client.set_endpoints(dict.fromkeys(addresses, True))
                    await eventually(lambda: client.connected() == 2)
                    silent.gate.clear()
                    assert await asyncio.gather(*(encode(client) for _ in range(4))) == [ids_of("hi")] * 4
                    assert client.connected() == 1 and len(silent.calls) == 2
                    for _ in range(4):
                        await encode(client)
                    assert len(silent.calls) == 2
                    silent.gate.set()
                    await eventually(lambda: client.connected() == 2)

        asyncio.run(test())

    def test_client_calls_a_stopping_tokenizer_once(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                leaving, other = Leaving(), Tokenizer()
                addresses = [await servers.start(leaving), await servers.start(other)]
                client = tokenizer_client()
                async with running(client.run):
                    client.set_endpoints(dict.fromkeys(addresses, True))
                    await eventually(lambda: client.connected() == 2)
                    assert [await encode(client) for _ in range(6)] == [ids_of("hi")] * 6
                    assert (len(leaving.calls), len(other.calls), client.connected()) == (1, 6, 1)

        asyncio.run(test())

    def test_call_may_use_the_whole_time_limit_when_no_other_tokenizer_is_connected(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                slow = Tokenizer()
                client = tokenizer_client(timeout_s=4.0)
                async with running(client.run):
                    client.set_endpoints({(await servers.start(slow)): True})
                    await eventually(lambda: client.connected() == 1)
                    slow.gate.clear()
                    call = asyncio.create_task(encode(client))
                    await asyncio.sleep(1.5)
                    slow.gate.set()
                    assert await call == ids_of("hi") and len(slow.calls) == 1

        asyncio.run(test())

    def test_call_continues_at_a_new_tokenizer_when_the_only_tokenizer_is_dead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time at the dead tokenizer does not count against the time limit."""
        monkeypatch.setattr(tokenizer_replica, "INFO_S", 0.2)

        async def test() -> None:
            async with replicas() as servers:
                dead, other = Tokenizer(), Tokenizer()
                addresses = [await servers.start(dead), await servers.start(other)]
                client = tokenizer_client(timeout_s=0.5)
                async with running(client.run):
                    client.set_endpoints({addresses[0]: True})
                    await eventually(lambda: client.connected() == 1)
                    dead.gate.clear()
                    call = asyncio.create_task(encode(client))
                    await eventually(lambda: client.connected() == 0)
                    await asyncio.sleep(0.6)
                    assert not call.done()
                    client.set_endpoints(dict.fromkeys(addresses, True))
                    assert await call == ids_of("hi") and len(other.calls) == 1
                    dead.gate.set()

        asyncio.run(test())

    def test_call_fails_after_wait_s_when_the_only_tokenizer_is_dead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokenizer_replica, "INFO_S", 0.1)

        async def test() -> None:
            async with replicas() as servers:
                dead = Tokenizer()
                client = tokenizer_client(timeout_s=0.2, wait_s=0.6)
                async with running(client.run):
                    client.set_endpoints({(await servers.start(dead)): True})
                    await eventually(lambda: client.connected() == 1)
                    dead.gate.clear()
                    with pytest.raises(ApiError) as raised:
                        await encode(client)
                    assert (raised.value.status, len(dead.calls)) == (503, 1)
                    dead.gate.set()

        asyncio.run(test())

    def test_client_calls_tokenizers_of_the_requested_model(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                fakes = [Tokenizer("one"), Tokenizer("two")]
                client = tokenizer_client(wait_s=0.5)
                async with running(client.run):
                    client.set_endpoints({(await servers.start(fake)): True for fake in fakes})
                    await eventually(lambda: client.connected() == 2)
                    assert [client.connected(model) for model in ("one", "two", "three")] == [1, 1, 0]
                    for _ in range(4):
                        await encode(client, model="two")
                    assert [len(fake.calls) for fake in fakes] == [0, 4]
                    with pytest.raises(ApiError) as raised:
                        await encode(client, model="three")
                    assert raised.value.status == 503

        asyncio.run(test())

    def test_client_finds_a_changed_model_behind_an_address(self) -> None:
        async def test() -> None:
            async with replicas() as servers:
                fake = Tokenizer("one")
                address = await servers.start(fake)
                client = tokenizer_client()
                async with running(client.run):
                    client.set_endpoints({address: True})
                    await eventually(lambda: client.connected("one") == 1)
                    fake.model = "two"
                    await servers.servers[address].stop(None)
                    server = grpc.aio.server(options=grpc_server.SERVER_OPTIONS)
                    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
                    assert server.add_insecure_port(address)
                    await server.start()
                    servers.servers[address] = server
                    await eventually(lambda: client.connected("two") == 1)
                    assert client.connected("one") == 0

        asyncio.run(test())
