"""Tests of the spans of tokenizer, worker and detokenizer, over real ports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from rootstock_llm.protos import common_pb2, detokenizer_pb2, tokenizer_pb2, worker_pb2
from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer
from rootstock_llm.services.shared.observe.spans import Tracing
from rootstock_llm.services.shared.observe.tracing import start_tracing
from rootstock_llm.services.shared.settings import ServiceSettings, load
from tests.services.collector import CALLER, SAMPLED, TRACE, UNSAMPLED, Collector, Received
from tests.services.detokenizer.test_server import row
from tests.services.detokenizer.test_server import serving as detokenizer
from tests.services.tokenizer.model_folders import KINDS
from tests.services.tokenizer.serving import serving as tokenizer
from tests.services.worker.conftest import CONFIG
from tests.services.worker.conftest import serving as worker
from tests.services.worker.front.test_server import FakeGateway, submit

WORKER_SPANS = ["decode", "generate", "prefill", "queue"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def tracing(collector: Collector) -> Iterator[Tracing]:
    started = start_tracing(load(ServiceSettings, "test", ["--otlp-endpoint", collector.address]), "test")
    assert started is not None
    yield started
    started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS["byte_level"](tmp_path_factory.mktemp("model") / "byte_level")


def names(collector: Collector) -> list[str]:
    return sorted({span.name for span in collector.spans})


def under(parent: Received, *children: Received) -> bool:
    return all((span.trace, span.parent) == (parent.trace, parent.id) and span.within(parent) for span in children)


def test_tokenizer_has_spans_for_encoding_and_rendering(collector: Collector, tracing: Tracing, folder: Path) -> None:
    async def run() -> None:
        async with tokenizer(folder, tracing) as serving:
            await serving.stub.Encode(tokenizer_pb2.EncodeRequest(request_id="r", texts=["one two"], traceparent=SAMPLED))
            await serving.stub.Encode(tokenizer_pb2.EncodeRequest(request_id="r", texts=["one two"], traceparent=UNSAMPLED))
            await serving.stub.Encode(tokenizer_pb2.EncodeRequest(request_id="r", texts=["one two"]))
            with pytest.raises(grpc.aio.AioRpcError):
                await serving.stub.Encode(tokenizer_pb2.EncodeRequest(request_id="r", traceparent=SAMPLED))
            chat = tokenizer_pb2.EncodeChatRequest(messages_json=b'[{"role": "user", "content": "Hi"}]', traceparent=SAMPLED)
            await serving.stub.EncodeChat(chat)

    asyncio.run(run())
    tracing.close()
    (whole, refused), encodes = collector.named("Encode"), collector.named("encode")
    (chat,), (render,) = collector.named("EncodeChat"), collector.named("render")
    assert (whole.trace, whole.parent, whole.failed) == (TRACE, CALLER, False)
    assert whole.attributes["rootstock.request_id"] == "r" and whole.attributes["rootstock.tokens"] > 0
    assert (refused.failed, refused.attributes["error.type"]) == (False, "INVALID_ARGUMENT")
    assert under(whole, encodes[0]) and under(chat, render, encodes[1])
    assert len(encodes) == 2
    assert render.span.end_time_unix_nano <= encodes[1].span.start_time_unix_nano


def test_detokenizer_has_a_span_for_each_sampled_request(collector: Collector, tracing: Tracing, folder: Path) -> None:
    def opened(handle: int, traceparent: str) -> detokenizer_pb2.DecodeOpen:
        return detokenizer_pb2.DecodeOpen(handle=handle, request_id=f"r{handle}", traceparent=traceparent, replay_ids=[10])

    async def run() -> None:
        async with detokenizer(load_tokenizer(folder), tracing) as (stub, _, _):
            call = stub.Decode()
            opens = [opened(1, SAMPLED), opened(2, ""), opened(3, SAMPLED), opened(4, SAMPLED)]
            await call.write(row(1, [10, 11], opens=opens))
            await call.write(row(1, [12], finished=True))
            await call.write(detokenizer_pb2.DecodeBatch(closes=[3]))
            for _ in range(3):
                await call.read()
            assert len(collector.wait_for("detokenize", 2)) == 2, "handle 4 is open, so its span has not ended"
            call.cancel()
            await asyncio.to_thread(collector.wait_for, "detokenize", 3)

    asyncio.run(run())
    spans = {span.attributes["rootstock.request_id"]: span for span in collector.named("detokenize")}
    assert sorted(spans) == ["r1", "r3", "r4"]
    assert {(span.trace, span.parent, span.failed) for span in spans.values()} == {(TRACE, CALLER, False)}
    assert spans["r1"].attributes["rootstock.tokens"] == 3
    assert spans["r1"].attributes["rootstock.replayed_tokens"] == 1
    assert {name: span.attributes["rootstock.ended_by"] for name, span in spans.items()} == {
        "r1": "finish",
        "r3": "close",
        "r4": "close",
    }


def traced(handle: int, prompt: list[int], context: str = SAMPLED, **sampling: object) -> worker_pb2.Submit:
    message = submit(handle, prompt, **sampling)
    message.traceparent = context
    return message


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_worker_has_spans_for_the_queue_and_each_prefill_chunk_and_decoding(
    collector: Collector, tracing: Tracing, overlap: bool
) -> None:
    async def run() -> None:
        config = replace(CONFIG, chunked_prefill_size=8)
        async with worker(step_s=0.003, config=config, overlap=overlap, tracing=tracing) as serving:
            gateway = FakeGateway(serving.stub)
            await gateway.hello()
            await gateway.send(traced(1, list(range(20))), traced(2, [1, 2, 3], UNSAMPLED), submit(3))
            await gateway.ended(1, 2, 3)
            await gateway.send(traced(4, list(range(20))))
            await gateway.ended(4)

    asyncio.run(run())
    tracing.close()
    assert names(collector) == WORKER_SPANS
    first, second = collector.named("generate")
    queue, decode = collector.named("queue")[0], collector.named("decode")[0]
    chunks = [span for span in collector.named("prefill") if span.parent == first.id]
    assert (first.trace, first.parent, first.failed) == (TRACE, CALLER, False)
    assert under(first, queue, decode, *chunks)
    assert queue.span.end_time_unix_nano == chunks[0].span.start_time_unix_nano
    starts = [span.attributes["rootstock.chunk.start"] for span in chunks]
    tokens = [span.attributes["rootstock.chunk.tokens"] for span in chunks]
    assert sum(tokens) == 20 and len(chunks) >= 3
    assert starts == [sum(tokens[:index]) for index in range(len(tokens))]
    assert all(span.span.end_time_unix_nano - span.span.start_time_unix_nano >= 2_500_000 for span in chunks), "a step takes 3 ms"
    assert all(a.span.start_time_unix_nano < b.span.start_time_unix_nano for a, b in pairwise(chunks))
    assert decode.span.start_time_unix_nano >= chunks[-1].span.end_time_unix_nano
    assert decode.attributes == {"rootstock.output_tokens": 10, "rootstock.retractions": 0}
    assert (first.attributes["rootstock.finish_reason"], first.attributes["rootstock.output_tokens"]) == ("length", 10)
    cached = [span for span in collector.named("prefill") if span.parent == second.id]
    assert [span.attributes["rootstock.cached_tokens"] for span in cached] == [16], "the pages of the first request"
    assert [span.attributes["rootstock.cached_tokens"] for span in chunks] == [0] * len(chunks)


def test_worker_records_each_retraction_as_a_span_event(collector: Collector, tracing: Tracing) -> None:
    async def run() -> None:
        async with worker(config=replace(CONFIG, retract_interval=9), tracing=tracing) as serving:
            gateway = FakeGateway(serving.stub)
            await gateway.hello()
            await gateway.send(*[traced(handle, [handle] * 8, max_new_tokens=60) for handle in range(1, 5)])
            await gateway.ended(1, 2, 3, 4)
            retractions = sum(finish.retractions for finish in gateway.finishes.values())
            assert retractions > 0

            tracing.close()
            spans = [*collector.named("decode"), *collector.named("generate")]
            traced_retractions = sum(span.attributes["rootstock.retractions"] for span in collector.named("decode"))
            assert traced_retractions == retractions
            assert sum(span.events.count("retracted") for span in spans) == retractions
            recomputed = [span for span in collector.named("prefill") if span.attributes["rootstock.chunk.number"] > 0]
            assert len(recomputed) >= retractions, "a retracted request has another prefill span"

    asyncio.run(run())


def test_worker_spans_end_when_requests_are_aborted(collector: Collector, tracing: Tracing) -> None:
    async def run() -> None:
        async with worker(step_s=0.003, config=replace(CONFIG, max_running_requests=2), tracing=tracing) as serving:
            closed, other = FakeGateway(serving.stub), FakeGateway(serving.stub)
            await closed.hello()
            await other.hello()
            await closed.send(*[traced(handle, [handle] * 4, max_new_tokens=200) for handle in range(1, 5)])
            await closed.until(lambda: len(closed.tokens) == 2)
            closed.call.cancel()
            await asyncio.to_thread(collector.wait_for, "generate", 4)
            refused = traced(9, [2000], max_new_tokens=5)
            await other.send(refused, traced(5, [1] * 4, max_new_tokens=200))
            await other.ended(9)
            await other.until(lambda: len(other.tokens[5]) > 1)
            await other.send(aborts=(5,))
            await other.ended(5)
            assert other.finishes[9].error == common_pb2.ERROR_CODE_INVALID_ARGUMENT

    asyncio.run(run())
    tracing.close()
    spans = collector.named("generate")
    assert len(spans) == 5, "the refused request has no span"
    assert {(span.failed, span.attributes["error.type"]) for span in spans} == {(False, "CANCELLED")}
    assert len(collector.named("queue")) == 5 and len(collector.named("decode")) == 3


def test_worker_span_is_failed_when_a_step_fails(collector: Collector, tracing: Tracing) -> None:
    async def run() -> None:
        async with worker(tracing=tracing) as serving:
            gateway = FakeGateway(serving.stub)
            await gateway.hello()
            serving.executor.fail_steps = {1}
            await gateway.send(traced(1, [1, 2, 3]))
            await gateway.ended(1)

    asyncio.run(run())
    tracing.close()
    (generate,), (prefill,) = collector.named("generate"), collector.named("prefill")
    assert (generate.failed, generate.attributes["error.type"]) == (True, "INTERNAL")
    assert under(generate, prefill)


def test_decode_span_counts_only_the_new_tokens_of_a_resumed_request(collector: Collector, tracing: Tracing) -> None:
    async def run() -> None:
        async with worker(tracing=tracing) as serving:
            gateway = FakeGateway(serving.stub)
            await gateway.hello()
            message = traced(1, [1, 2, 3])
            message.output_ids.extend([4, 5, 6, 8])
            await gateway.send(message)
            await gateway.ended(1)

    asyncio.run(run())
    tracing.close()
    (generate,), (decode,) = collector.named("generate"), collector.named("decode")
    assert generate.attributes["rootstock.resumed_tokens"] == 4
    assert (generate.attributes["rootstock.output_tokens"], decode.attributes["rootstock.output_tokens"]) == (10, 6)
