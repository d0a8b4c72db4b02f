"""Tests of operations on a serving worker: real gRPC on both ports, real loop and core, fake executor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from rootstock_llm.protos import common_pb2, control_pb2_grpc
from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.control_values import as_json
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.worker.control.server import start_control
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.exec.fake import fake_experts
from rootstock_llm.services.worker.front.outbox import BEAT_S, GAP_S
from rootstock_llm.services.worker.identity.model_identity import ServedWeights
from rootstock_llm.services.worker.loop.inbox import Stop
from tests.services.worker.conftest import CONFIG, Serving, serving
from tests.services.worker.control.address import control_at
from tests.services.worker.control.test_control_servicer import changes
from tests.services.worker.front.test_server import FakeGateway, expected, submit

ABORTED = common_pb2.FINISH_REASON_ABORT
GUARD_S = 180.0  # seconds; ends a test that hangs


class Operated:
    """A worker with one connected gateway stream and its control service."""

    def __init__(self, worker: Serving, gateway: FakeGateway, control: control_pb2_grpc.ControlStub) -> None:
        self.worker, self.gateway, self.control = worker, gateway, control

    async def state(self) -> dict[str, Any]:
        return as_json(await self.control.GetInternalState(pb.GetInternalStateRequest()))

    async def stats(self) -> dict[str, Any]:
        return (await self.state())["stats"]

    async def pause(self, mode: pb.PauseMode) -> None:
        await self.control.Pause(pb.PauseRequest(mode=mode))

    async def carry_on(self) -> None:
        await self.control.Continue(pb.ContinueRequest())

    async def refusal(self, call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code(), caught.value.details() or ""


@asynccontextmanager
async def operated(
    step_s: float = 0.002,
    overlap: bool = True,
    gap_s: float = GAP_S,
    beat_s: float = BEAT_S,
    weights: ServedWeights | None = None,
    config: SchedulerConfig = CONFIG,
) -> AsyncIterator[Operated]:
    revision = weights.identity.revision if weights else ""
    async with serving(step_s, config, overlap, gap_s, beat_s, revision=revision) as worker:
        at = control_at(port=free_ports(1)[0])
        control = await start_control(at, worker.inbox.put, "w", "fake", weights)
        if weights is not None:
            weights.on_replaced = worker.servicer.weights_replaced
        assert control is not None
        try:
            async with grpc_server.channel(f"127.0.0.1:{control.port}") as channel:
                gateway = FakeGateway(worker.stub)
                await gateway.hello()
                yield Operated(worker, gateway, control_pb2_grpc.ControlStub(channel))
        finally:
            await control.stop(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            await test()

    asyncio.run(guarded())


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_cache_flush_during_requests_does_not_change_completions(overlap: bool) -> None:
    async def check() -> None:
        async with operated(overlap=overlap) as at:
            prompts = {handle: [9] * 12 + [handle] * 9 for handle in range(6)}
            freed = 0
            for wave in range(4):
                handles = [wave * 10 + handle for handle in prompts]
                await at.gateway.send(
                    *[submit(wave * 10 + handle, prompt, max_new_tokens=30) for handle, prompt in prompts.items()]
                )
                for tokens in (2, 10, 20):
                    await at.gateway.until(lambda: all(len(at.gateway.tokens[h]) >= tokens for h in handles))  # noqa: B023
                    freed += (await at.control.FlushCache(pb.FlushCacheRequest())).pages
                await at.gateway.ended(*handles)
                for handle, prompt in prompts.items():
                    assert at.gateway.tokens[wave * 10 + handle] == expected(prompt, 30)
            await at.control.FlushCache(pb.FlushCacheRequest())
            stats = await at.stats()
            assert freed > 0 and (stats["pages_cached"], stats["pages_leased"]) == (0, 0)
            await at.gateway.send(submit(99, prompts[0]))
            await at.gateway.ended(99)
            assert at.gateway.finishes[99].cached_tokens == 0

    run(check)


def test_begin_and_end_of_a_pause_are_reported_to_gateways_at_once() -> None:
    async def check() -> None:
        async with operated(gap_s=3600, beat_s=3600) as at:
            await at.gateway.until(lambda: len(at.gateway.loads) == 1)
            await at.pause(pb.PAUSE_MODE_IN_PLACE)
            await at.gateway.until(lambda: at.gateway.loads[-1].paused)
            await at.carry_on()
            await at.gateway.until(lambda: not at.gateway.loads[-1].paused)
            assert [load.paused for load in at.gateway.loads] == [False, True, False]

    run(check)


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", [pb.PAUSE_MODE_RETRACT, pb.PAUSE_MODE_IN_PLACE])
def test_paused_worker_computes_nothing_and_continues_with_the_same_tokens(mode: pb.PauseMode, overlap: bool) -> None:
    async def check() -> None:
        async with operated(overlap=overlap) as at:
            prompts = {handle: [handle + 1] * 9 for handle in range(5)}
            await at.gateway.send(*[submit(handle, prompt, max_new_tokens=60) for handle, prompt in prompts.items()])
            await at.gateway.until(lambda: all(len(at.gateway.tokens[handle]) > 5 for handle in prompts))
            await at.pause(mode)
            resting = await at.stats()
            assert (resting["pages_leased"] > 0) == (mode == pb.PAUSE_MODE_IN_PLACE)
            assert (resting["num_running"], resting["num_waiting"]) == ((5, 0) if mode == pb.PAUSE_MODE_IN_PLACE else (0, 5))
            await at.gateway.send(submit(5, [77] * 9))
            await asyncio.sleep(0.1)
            later = await at.state()
            assert later["paused"] and later["stats"]["generated_tokens_total"] == resting["generated_tokens_total"]
            assert not at.gateway.finishes
            await at.carry_on()
            await at.gateway.ended(*range(6))
            for handle, prompt in prompts.items():
                assert at.gateway.tokens[handle] == expected(prompt, 60)
            assert at.gateway.tokens[5] == expected([77] * 9, 10), "a request that arrived during the pause runs after it"

    run(check)


def test_pause_with_abort_ends_present_requests_and_queues_later_requests() -> None:
    async def check() -> None:
        async with operated() as at:
            await at.gateway.send(*[submit(handle, max_new_tokens=200) for handle in range(40)])
            await at.gateway.until(lambda: len(at.gateway.tokens[0]) > 3)
            await at.pause(pb.PAUSE_MODE_ABORT)
            await at.gateway.ended(*range(40))
            assert {finish.reason for finish in at.gateway.finishes.values()} == {ABORTED}
            stats = await at.stats()
            assert (stats["num_running"], stats["num_waiting"], stats["pages_leased"]) == (0, 0, 0)
            await at.gateway.send(submit(50))
            await asyncio.sleep(0.05)
            assert 50 not in at.gateway.finishes
            await at.carry_on()
            await at.gateway.ended(50)
            assert at.gateway.tokens[50] == expected([1, 2, 3], 10)

    run(check)


def test_slowed_worker_reads_messages_during_the_wait_between_steps() -> None:
    async def check() -> None:
        async with operated() as at:
            await at.control.SlowDown(pb.SlowDownRequest(step_delay_s=0.1))
            began = time.monotonic()
            await at.gateway.send(submit(1, max_new_tokens=6, stream_interval=1))
            await at.gateway.ended(1)
            assert time.monotonic() - began > 0.4
            assert at.gateway.tokens[1] == expected([1, 2, 3], 6)
            await at.control.SlowDown(pb.SlowDownRequest(step_delay_s=10))
            await at.gateway.send(submit(2, max_new_tokens=200), submit(3, max_new_tokens=20))
            assert (await at.state())["step_delay_s"] == 10
            await at.gateway.send(aborts=(2,))
            await at.gateway.ended(2)
            await at.control.SlowDown(pb.SlowDownRequest())
            await at.gateway.ended(3)
            assert at.gateway.tokens[3] == expected([1, 2, 3], 20)
            assert time.monotonic() - began < 9, "the loop reads messages during the wait"

    run(check)


def test_changed_tunables_apply_from_the_next_step() -> None:
    async def check() -> None:
        async with operated() as at:
            await at.gateway.send(*[submit(handle, max_new_tokens=200) for handle in range(8)])
            await at.gateway.until(lambda: len(at.gateway.tokens[7]) > 3)
            state = as_json(await at.control.SetInternalState(changes(max_running_requests=2, new_token_ratio=1)))
            assert (state["tunables"]["max_running_requests"], state["tunables"]["new_token_ratio"]) == (2, 1.0)
            await at.gateway.send(submit(20, max_new_tokens=5), aborts=tuple(range(7)))
            await at.gateway.send(*[submit(handle, max_new_tokens=40) for handle in range(30, 36)])
            while (await at.stats())["num_waiting"]:
                assert (await at.stats())["num_running"] <= 2
            await at.gateway.ended(20, *range(30, 36))
            code, details = await at.refusal(at.control.SetInternalState(changes(max_running_requests=0)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "max_running_requests" in details

    run(check)


def test_memory_release_is_refused_when_requests_still_run_at_the_deadline() -> None:
    async def check() -> None:
        async with operated(step_s=0.03) as at:
            await at.gateway.send(submit(1, max_new_tokens=240), submit(2, max_new_tokens=240))
            await at.gateway.until(lambda: len(at.gateway.tokens[1]) > 3)
            refusal = asyncio.create_task(at.refusal(at.control.ReleaseMemory(pb.ReleaseMemoryRequest(), timeout=4.0)))
            await at.gateway.send(submit(3, max_new_tokens=5))
            await at.gateway.ended(3)
            code, details = await refusal
            assert code is grpc.StatusCode.FAILED_PRECONDITION and "2" in details
            assert not (await at.state())["paused"]
            await at.gateway.ended(1, 2)
            assert at.gateway.tokens[1] == expected([1, 2, 3], 240)

    run(check)


def test_memory_release_waits_until_idle_and_the_worker_serves_again_after_resume() -> None:
    async def check() -> None:
        async with operated() as at:
            prompt = list(range(20))
            await at.gateway.send(submit(1, prompt, max_new_tokens=40))
            await at.gateway.until(lambda: len(at.gateway.tokens[1]) > 3)
            released = await at.control.ReleaseMemory(pb.ReleaseMemoryRequest(), timeout=GUARD_S)
            assert len(released.released) == 2
            await at.gateway.ended(1)
            assert at.gateway.tokens[1] == expected(prompt, 40)
            state = await at.state()
            assert state["paused"] and state["released"] == ["kv_cache", "weights"] and state["stats"]["pages_cached"] == 0
            code, _ = await at.refusal(at.control.Continue(pb.ContinueRequest()))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            await at.gateway.send(submit(2, [5] * 9))
            await at.gateway.ended(2)
            assert at.gateway.finishes[2].error == common_pb2.ERROR_CODE_UNAVAILABLE
            await at.control.ResumeMemory(pb.ResumeMemoryRequest())
            await at.gateway.send(submit(3, prompt, max_new_tokens=40))
            await at.gateway.ended(3)
            assert at.gateway.tokens[3] == expected(prompt, 40) and at.gateway.finishes[3].cached_tokens == 0

    run(check)


def test_memory_release_has_no_effect_when_the_call_is_cancelled_before_the_worker_is_idle() -> None:
    async def check() -> None:
        async with operated(step_s=0.005) as at:
            await at.gateway.send(submit(1, max_new_tokens=100))
            await at.gateway.until(lambda: len(at.gateway.tokens[1]) > 3)
            call = at.control.ReleaseMemory(pb.ReleaseMemoryRequest(), timeout=GUARD_S)
            await asyncio.sleep(0.1)
            call.cancel()
            await at.gateway.ended(1)
            await asyncio.sleep(0.1)
            state = await at.state()
            assert not state["released"] and not state["paused"]

    run(check)


def test_pending_operation_fails_with_unavailable_when_the_loop_stops() -> None:
    async def check() -> None:
        async with operated(step_s=0.005) as at:
            await at.gateway.send(submit(1, max_new_tokens=240))
            await at.gateway.until(lambda: len(at.gateway.tokens[1]) > 3)
            refusal = asyncio.create_task(at.refusal(at.control.ReleaseMemory(pb.ReleaseMemoryRequest())))
            await asyncio.sleep(0.1)
            at.worker.inbox.put(Stop())
            code, _ = await refusal
            assert code is grpc.StatusCode.UNAVAILABLE

    run(check)


def test_profile_is_refused_when_the_executor_has_no_device() -> None:
    async def check() -> None:
        async with operated() as at:
            code, _ = await at.refusal(at.control.StartProfile(pb.StartProfileRequest(name="x")))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert not (await at.state())["profile"]

    run(check)


def test_trace_request_call_returns_the_scheduler_events_of_a_request() -> None:
    async def check() -> None:
        async with operated() as at:
            await at.gateway.send(submit(1, [9] * 20, max_new_tokens=5))
            await at.gateway.ended(1)
            events = (await at.control.TraceRequest(pb.TraceRequestRequest(request_id="r1"))).events
            kinds = [(event.kind, event.detail) for event in events]
            assert kinds == [("queued", 20), ("admitted", 0), ("prefilled", 20), ("ended", 5)]
            assert sorted(event.at_s for event in events) == [event.at_s for event in events]
            assert not (await at.control.TraceRequest(pb.TraceRequestRequest(request_id="nobody"))).events

    run(check)


EXPERTS = ExpertShape((0, 2), 8, 3)


@pytest.mark.parametrize("overlap", [True, False])
def test_expert_record_counts_the_routed_experts_of_concurrent_requests(overlap: bool) -> None:
    async def check() -> None:
        async with operated(overlap=overlap, config=replace(CONFIG, experts=EXPERTS)) as at:
            await at.gateway.send(submit(0, [5] * 9))
            await at.gateway.ended(0)
            await at.control.StartExpertDistributionRecord(pb.StartExpertDistributionRecordRequest())
            prompts = {handle: [handle] * (3 + 2 * handle) for handle in range(1, 6)}
            submits = [submit(handle, prompt, max_new_tokens=12) for handle, prompt in prompts.items()]
            for each in submits:
                each.routed_experts_from = 0
            await at.gateway.send(*submits)
            await at.gateway.ended(*prompts)
            dump = as_json(await at.control.DumpExpertDistributionRecord(pb.DumpExpertDistributionRecordRequest()))
            await at.control.StopExpertDistributionRecord(pb.StopExpertDistributionRecordRequest())
            counts = np.zeros((2, 8), dtype=np.int64)
            for handle, prompt in prompts.items():
                computed = np.array([*prompt, *expected(prompt, 12)[:-1]], dtype=np.int32)
                wanted = fake_experts(computed, 0, EXPERTS)
                routed = np.frombuffer(at.gateway.routed[handle], "<u2").reshape(-1, 2, 3)
                assert routed.tolist() == wanted.tolist()
                counts += [np.bincount(wanted[:, layer].ravel(), minlength=8) for layer in range(2)]
            assert [layer["counts"] for layer in dump["logical_count"]] == counts.tolist()
            assert counts.sum() == dump["num_tokens"] * 3 * 2
            assert (await at.stats())["expert_balancedness"] == pytest.approx(dump["balancedness"])

    run(check)


def test_expert_record_and_routed_experts_are_refused_when_the_model_has_no_experts() -> None:
    async def check() -> None:
        async with operated() as at:
            code, _ = await at.refusal(at.control.StartExpertDistributionRecord(pb.StartExpertDistributionRecordRequest()))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            wants_experts = submit(1, [5] * 9)
            wants_experts.routed_experts_from = 0
            await at.gateway.send(wants_experts)
            await at.gateway.ended(1)
            assert (at.gateway.finishes[1].reason, at.gateway.finishes[1].field) == (ABORTED, "routed_experts_from")

    run(check)
