"""Tests of the Worker service over real gRPC, with real loop and core and a fake executor."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rootstock_llm.protos import common_pb2, worker_pb2, worker_pb2_grpc
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.exec.fake import hashed_token
from tests.services.worker.conftest import CONFIG, run, serving

LENGTH, TOKEN, STRING, ABORT = (
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_MATCHED_TOKEN,
    common_pb2.FINISH_REASON_MATCHED_STRING,
    common_pb2.FINISH_REASON_ABORT,
)


def submit(handle: int, prompt: list[int] | None = None, stream: bool = True, **sampling: Any) -> worker_pb2.Submit:
    values = {"max_new_tokens": 10, "ignore_eos": True, **sampling}
    params = common_pb2.SamplingParams(**values)
    return worker_pb2.Submit(
        handle=handle, request_id=f"r{handle}", prompt_ids=prompt or [1, 2, 3], sampling=params, stream=stream
    )


def expected(prompt: list[int], count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(hashed_token(np.array(prompt + out, dtype=np.int32), 1000))
    return out


class FakeGateway:
    """A Generate stream, as a gateway opens it. Collects outputs by handle."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        self.call = stub.Generate()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finishes: dict[int, worker_pb2.Finish] = {}
        self.routed: dict[int, bytes] = defaultdict(bytes)  # routed experts
        self.loads: list[worker_pb2.WorkerLoad] = []
        self.hellos: list[worker_pb2.WorkerInfo] = []  # repeated hellos, without the first
        self.messages = 0

    async def hello(self) -> worker_pb2.WorkerInfo:
        return (await self.call.read()).hello

    async def send(self, *submits: worker_pb2.Submit, aborts: tuple[int, ...] = ()) -> None:
        await self.call.write(worker_pb2.GenerateRequest(submits=submits, aborts=aborts))

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not done():
                assert await self.next(), "the stream has ended"

    async def next(self) -> bool:
        """Takes one message. Returns False if the stream has ended."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        if message.HasField("load"):
            self.loads.append(message.load)
        elif message.HasField("hello"):
            self.hellos.append(message.hello)
        else:
            self._take(message.step)
        return True

    async def ended(self, *handles: int) -> None:
        await self.until(lambda: set(handles) <= set(self.finishes))

    def _take(self, step: worker_pb2.StepOutput) -> None:
        self.messages += 1
        tokens = iter(step.token_ids)
        for handle, count in zip(step.handles, step.counts, strict=True):
            assert handle not in self.finishes
            self.tokens[handle] += [next(tokens) for _ in range(count)]
        for routed in step.routed_experts:
            self.routed[routed.handle] += routed.ids
        for finish in step.finishes:
            assert finish.handle not in self.finishes, "a request has one finish"
            self.finishes[finish.handle] = finish


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_of_all_requests_share_one_message_per_step(overlap: bool) -> None:
    async def check() -> None:
        async with serving(step_s=0.005, overlap=overlap) as worker:
            gateway = FakeGateway(worker.stub)
            assert (await gateway.hello()).generation == 5
            await gateway.send(*[submit(handle, [handle + 1] * 5) for handle in range(20)])
            await gateway.ended(*range(20))
            for handle in range(20):
                assert gateway.tokens[handle] == expected([handle + 1] * 5, 10)
                finish = gateway.finishes[handle]
                assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == (LENGTH, 5, 10)
            assert gateway.messages <= 14, "a message per step, not per token or request"

    run(check)


def test_second_request_reports_cached_tokens() -> None:
    async def check() -> None:
        async with serving() as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, list(range(20))))
            await gateway.ended(1)
            await gateway.send(submit(2, list(range(20))))
            await gateway.ended(2)
            assert (gateway.finishes[1].cached_tokens, gateway.finishes[2].cached_tokens) == (0, 16)

    run(check)


def test_abort_ends_the_request_once_and_frees_the_pages() -> None:
    async def check() -> None:
        async with serving(step_s=0.005) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, max_new_tokens=200), submit(2, max_new_tokens=20))
            await gateway.until(lambda: len(gateway.tokens[1]) > 3)
            await gateway.send(aborts=(1, 99))
            await gateway.ended(1, 2)
            assert gateway.finishes[1].reason == ABORT
            assert gateway.finishes[1].error == common_pb2.ERROR_CODE_CANCELLED
            assert gateway.finishes[2].reason == LENGTH
            assert (await worker.idle()).pages_leased == 0

    run(check)


def test_closed_gateway_stream_frees_only_its_requests() -> None:
    async def check() -> None:
        async with serving(step_s=0.005) as worker:
            first, second = FakeGateway(worker.stub), FakeGateway(worker.stub)
            await first.hello()
            await second.hello()
            await first.send(*[submit(handle, max_new_tokens=240) for handle in range(36)])
            await second.send(submit(1, max_new_tokens=30))
            await first.until(lambda: len(first.tokens) > 3)
            first.call.cancel()
            await second.ended(1)
            assert second.tokens[1] == expected([1, 2, 3], 30), "the request of the other stream continues"
            stats = await worker.idle()
            assert (stats.pages_leased, stats.num_waiting, stats.num_running) == (0, 0, 0)

    run(check)


BAD = {
    "empty prompt": {"prompt_ids": []},
    "token outside the vocabulary": {"prompt_ids": [1, 1000]},
    "prompt over the context": {"prompt_ids": [1] * 256},
    "salt too long": {"cache_salt": "x" * 1000},
}
INVALID_SAMPLING = {  # examples; test_wire_submit.py checks all fields in submit_from_pb()
    "temperature": {"temperature": -1.0},
    "stop too many": {"stop": ["x"] * 17},
    "stop_token_ids": {"stop_token_ids": [1] * 257},
    "logit_bias value": {"logit_bias_ids": [1], "logit_bias_values": [1000.0]},
}


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize("name", [*BAD, *INVALID_SAMPLING])
def test_worker_refuses_invalid_requests(name: str) -> None:
    async def check() -> None:
        async with serving() as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            message = submit(1, **INVALID_SAMPLING.get(name, {}))
            for field, value in BAD.get(name, {}).items():
                message.ClearField(field)  # type: ignore[arg-type]
                message.MergeFrom(worker_pb2.Submit(**{field: value}))  # type: ignore[arg-type]
            await gateway.send(message)
            await gateway.ended(1)
            assert gateway.finishes[1].error == common_pb2.ERROR_CODE_INVALID_ARGUMENT
            assert gateway.finishes[1].message
            assert worker.core.idle

    run(check)


def test_refused_request_releases_the_kv_reservation_and_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with serving(config=replace(CONFIG, reads_peers=True)) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            room = worker_pb2.KvRoom(room=9, epoch=5, secret=bytes(16), pages=1)
            source = worker_pb2.KvSource(address="127.0.0.1:1", room=room)
            prefetch = worker_pb2.Prefetch(handle=1, prompt_ids=range(20), source=source)
            await gateway.call.write(worker_pb2.GenerateRequest(prefetches=[prefetch]))
            tiers = worker.core.tiers
            assert tiers is not None
            await until(lambda: len(tiers.prefetches) == 1)
            refused = submit(1, top_p=2.0)
            refused.source.CopyFrom(source)
            released: list[KvSource] = []
            monkeypatch.setattr(worker.core.reservations, "release_source", released.append)
            await gateway.send(refused)
            await gateway.ended(1)
            assert gateway.finishes[1].error == common_pb2.ERROR_CODE_INVALID_ARGUMENT
            hold_s = CONFIG.disaggregation_hold_s  # after this time, the prefetch would end without a refusal
            await until(lambda: len(tiers.prefetches) == 0 and len(released) == 1, hold_s / 2)
            assert released == [KvSource(KvReservation(9, 5, bytes(16)), "127.0.0.1:1", 1)], (
                "the worker releases the KV reservation of the refused request"
            )

    run(check)


async def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for the condition for at most `seconds`."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


def test_worker_refuses_requests_when_the_queue_is_full() -> None:
    async def check() -> None:
        async with serving(step_s=0.02) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(*[submit(handle, max_new_tokens=100) for handle in range(120)])
            await gateway.until(lambda: len(gateway.finishes) >= 20)
            assert {f.error for f in gateway.finishes.values()} == {common_pb2.ERROR_CODE_QUEUE_FULL}

    run(check)


def test_worker_ends_requests_at_stop_strings_and_stop_tokens() -> None:
    async def check() -> None:
        async with serving() as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            whole = expected([1, 2, 3], 10)
            letters = "".join(chr(97 + token % 26) for token in whole)
            await gateway.send(submit(1, stop=[letters[3:5]]), submit(2, stop_token_ids=[whole[4]]), submit(3, stream=False))
            await gateway.ended(1, 2, 3)
            assert (gateway.finishes[1].reason, gateway.finishes[1].matched_stop) == (STRING, letters[3:5])
            assert (gateway.finishes[2].reason, gateway.finishes[2].matched_token) == (TOKEN, whole[4])
            assert gateway.tokens[3] == whole

    run(check)


def test_failing_step_ends_only_the_requests_of_the_step() -> None:
    async def check() -> None:
        async with serving(step_s=0.002) as worker:
            worker.executor.fail_steps = {3}
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, max_new_tokens=50))
            await gateway.ended(1)
            assert gateway.finishes[1].error == common_pb2.ERROR_CODE_INTERNAL
            await gateway.send(submit(2))
            await gateway.ended(2)
            assert gateway.tokens[2] == expected([1, 2, 3], 10)
            assert (await worker.idle()).pages_leased == 0

    run(check)


def test_metrics_have_the_names_of_sglang_and_exact_counts() -> None:
    async def check() -> None:
        async with serving() as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, list(range(20))))
            await gateway.ended(1)
            await gateway.send(submit(2, list(range(20)), max_new_tokens=5))
            await gateway.ended(2)
            await worker.idle()
            registry = CollectorRegistry()
            registry.register(worker.metrics)
            labels = '{engine_type="unified",model_name="fake",pp_rank="0",tp_rank="0"}'
            lines = dict(
                line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")
            )
            for name, value in {
                "sglang:prompt_tokens_total": 40,
                "sglang:cached_tokens_total": 16,
                "sglang:generation_tokens_total": 15,
                "sglang:num_requests_total": 2,
                "sglang:time_to_first_token_seconds_count": 2,
                "sglang:inter_token_latency_seconds_count": 13,
                "sglang:e2e_request_latency_seconds_count": 2,
                "sglang:queue_time_seconds_count": 2,
                "sglang:num_running_reqs": 0,
                "sglang:token_usage": 0,
                "sglang:max_total_num_tokens": 1024,
            }.items():
                assert float(lines[name + labels]) == value, name

    run(check)


def test_reused_handle_ends_the_stream_and_all_of_its_requests() -> None:
    async def check() -> None:
        async with serving(step_s=0.005) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, max_new_tokens=200))
            await gateway.until(lambda: len(gateway.tokens[1]) > 1)
            await gateway.send(submit(1))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await gateway.ended(1)
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert (await worker.idle()).pages_leased == 0

    run(check)
