"""Tests of the control service over real gRPC. A fake loop runs each command at once, or passes it to a function of the test."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.protos import control_pb2_grpc
from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.control_values import Scalar, as_json, put_values
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.worker.control.server import ControlAddress, start_control
from rootstock_llm.services.worker.control.servicer import BARRIERS
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.experts import ExpertDistribution, ExpertShape
from rootstock_llm.services.worker.core.contracts.messages import PauseMode
from rootstock_llm.services.worker.core.contracts.plan import StepResult, idle_plan
from rootstock_llm.services.worker.core.contracts.transfers import ALL, Deleted, Selection, Tier
from rootstock_llm.services.worker.core.planning.expert_record import ExpertRecord
from rootstock_llm.services.worker.exec.contracts.operations import (
    DeleteStored,
    Operation,
    OperationRefused,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerRate
from rootstock_llm.services.worker.loop.inbox import Barrier, Command, LoopEnded, NotIdle, Pace
from tests.services.worker.control.address import control_at

TOKEN = "an operators' token"
Stub = control_pb2_grpc.ControlStub


EXPERTS = ExpertShape((0, 3), 3, 1)


@dataclass
class FakeCore:
    """Replaces SchedulerControl. Records calls of its methods."""

    experts: ExpertRecord = field(default_factory=lambda: ExpertRecord(EXPERTS))

    calls: list[Any] = field(default_factory=list)  # recorded calls, in order
    paused: bool = False  # whether pause() was called after the last resume()
    closed: str = ""  # reason of the last close(); empty while open
    values: dict[str, Any] = field(
        default_factory=lambda: {"policy": "lpm", "new_token_ratio": 0.5, "chunk": 128, "mixed": False}
    )

    def flush_cache(self) -> int:
        self.calls.append("flush")
        return 12

    def flush_tiers(self, tiers: Sequence[Tier]) -> int:
        self.calls.append(("flush", *map(str, tiers)))
        return 0

    def forget_salt(self, salt: str, tiers: Sequence[Tier]) -> int:
        self.calls.append(("forget", salt, *map(str, tiers)))
        return 5

    def storage_tag(self, salt: str) -> bytes:
        return f"tag {salt}".encode()

    def pause(self, mode: PauseMode, now: float) -> None:
        self.calls.append(mode)
        self.paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def close(self, reason: str) -> None:
        self.closed = reason

    def reopen(self) -> None:
        self.closed = ""

    def reset_memory(self) -> None:
        self.calls.append("reset_memory")

    @property
    def has_experts(self) -> bool:
        return self.experts.shape is not None

    @property
    def records_experts(self) -> bool:
        return self.experts.is_running

    def start_expert_record(self) -> None:
        self.experts.start()

    def stop_expert_record(self) -> None:
        self.experts.stop()

    def expert_distribution(self) -> ExpertDistribution | None:
        return self.experts.distribution()

    def tunables(self) -> dict[str, Any]:
        return dict(self.values)

    def retune(self, changes: Mapping[str, Any]) -> None:
        if changes.get("policy") == "worst":
            raise ValueError("policy: must be one of fcfs, lpm")
        self.values |= changes

    def stats(self) -> StepStats:
        return StepStats(**dict.fromkeys(StepStats.__dataclass_fields__, 0) | {"num_running": 3, "new_token_ratio": 0.25})


@dataclass
class FakeExecutor:
    """Replaces the Executor. Records operations, or refuses them."""

    applied: list[Operation] = field(default_factory=list)  # operations that were not refused
    refusal: str = ""  # message of the refusals; empty if operations succeed
    # Result of a storage deletion. If it is None, the deletion does not end.
    deleted: Deleted | Exception | None = field(default_factory=lambda: Deleted(7))

    def apply(self, operation: Operation) -> None:
        if self.refusal:
            raise OperationRefused(self.refusal)
        self.applied.append(operation)
        if isinstance(operation, DeleteStored) and self.deleted is not None:
            if isinstance(self.deleted, Exception):
                operation.done.set_exception(self.deleted)
            else:
                operation.done.set_result(self.deleted)


@dataclass
class FakeLoop:
    """Replaces the Loop. Runs commands on the caller's thread."""

    core: FakeCore = field(default_factory=FakeCore)
    executor: FakeExecutor = field(default_factory=FakeExecutor)
    pace: Pace = field(default_factory=Pace)
    commands: list[Command] = field(default_factory=list)  # commands that were put, in order
    handle: Callable[[Command], None] | None = None  # handles commands instead of run(), if set

    def put(self, command: Command) -> None:
        self.commands.append(command)
        (self.handle or self.run)(command)

    def run(self, command: Command) -> None:
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            command.future.set_result(command.action(self.core, self.executor, self.pace))  # type: ignore[arg-type]
        except Exception as error:
            command.future.set_exception(error)


@asynccontextmanager
async def control(loop: FakeLoop, folder: Path = Path("unused"), token: str = "") -> AsyncIterator[Stub]:
    at = control_at(port=free_ports(1)[0], token=token, profile_dir=str(folder))
    peers = [PeerRate("10.0.0.7:8010", "shm", 5e9)]
    server = await start_control(at, loop.put, "worker/0", "demo", kv_peers=lambda: peers)
    assert server is not None
    try:
        async with grpc_server.channel(f"127.0.0.1:{server.port}") as channel:
            yield Stub(channel)
    finally:
        await server.stop(0)


async def status_of(call: Coroutine[Any, Any, Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def changes(**values: Scalar) -> pb.SetInternalStateRequest:
    request = pb.SetInternalStateRequest()
    put_values(request.tunables, values)
    return request


REQUESTS = {
    "FlushCache": pb.FlushCacheRequest(),
    "GetInternalState": pb.GetInternalStateRequest(),
    "SetInternalState": pb.SetInternalStateRequest(),
    "SlowDown": pb.SlowDownRequest(),
    "Pause": pb.PauseRequest(mode=pb.PAUSE_MODE_RETRACT),
    "Continue": pb.ContinueRequest(),
    "StartProfile": pb.StartProfileRequest(),
    "StopProfile": pb.StopProfileRequest(),
    "StartExpertDistributionRecord": pb.StartExpertDistributionRecordRequest(),
    "StopExpertDistributionRecord": pb.StopExpertDistributionRecordRequest(),
    "DumpExpertDistributionRecord": pb.DumpExpertDistributionRecordRequest(),
    "FreezeGc": pb.FreezeGcRequest(),
    "ReleaseMemory": pb.ReleaseMemoryRequest(),
    "ResumeMemory": pb.ResumeMemoryRequest(),
    "SetLogLevel": pb.SetLogLevelRequest(level=logging.getLevelName(logging.getLogger().level).lower()),
    "TraceRequest": pb.TraceRequestRequest(request_id="r"),
}


def test_every_control_operation_is_in_the_barrier_table() -> None:
    service = pb.DESCRIPTOR.services_by_name["Control"]
    assert set(BARRIERS) == {method.name for method in service.methods} == set(REQUESTS)


def test_control_page_shows_the_barrier_table() -> None:
    page = (Path(__file__).parents[4] / "docs/reference/control.md").read_text()
    page = page.partition("| operation | barrier |")[2].partition("\n### ")[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): Barrier(row[2].strip()) for row in rows} == BARRIERS


def test_each_operation_uses_the_barrier_that_the_table_lists() -> None:
    async def run() -> dict[str, Barrier]:
        barriers: dict[str, Barrier] = {}
        loop = FakeLoop(handle=lambda command: command.future.set_exception(NotIdle("2 requests run")))
        async with control(loop) as stub:
            for name, request in REQUESTS.items():
                code, _ = await status_of(getattr(stub, name)(request))
                assert code is grpc.StatusCode.FAILED_PRECONDITION, name
                barriers[name] = loop.commands[-1].barrier
        return barriers

    assert asyncio.run(run()) == BARRIERS


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ValueError("chunk: is below a page"), grpc.StatusCode.INVALID_ARGUMENT),
        (NotIdle("2 requests run"), grpc.StatusCode.FAILED_PRECONDITION),
        (OperationRefused("not here"), grpc.StatusCode.FAILED_PRECONDITION),
        (LoopEnded("the worker is stopping"), grpc.StatusCode.UNAVAILABLE),
        (KeyError("a fault"), grpc.StatusCode.INTERNAL),
    ],
)
def test_grpc_status_of_a_call_follows_the_exception_of_the_operation(raised: Exception, code: grpc.StatusCode) -> None:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with control(FakeLoop(handle=lambda command: command.future.set_exception(raised))) as stub:
            return await status_of(stub.FlushCache(pb.FlushCacheRequest()))

    found, details = asyncio.run(run())
    assert found is code and str(raised) in details


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),), (("token", TOKEN),)])
def test_call_without_the_token_is_unauthenticated_and_runs_no_command(metadata: tuple[tuple[str, str], ...]) -> None:
    async def run() -> FakeLoop:
        loop = FakeLoop()
        async with control(loop, token=TOKEN) as stub:
            for name, request in REQUESTS.items():
                code, _ = await status_of(getattr(stub, name)(request, metadata=metadata))
                assert code is grpc.StatusCode.UNAUTHENTICATED, name
        return loop

    assert asyncio.run(run()).commands == []


@pytest.mark.parametrize(
    ("names", "calls", "pages"),
    [
        ((), ["flush", ("flush", "device", "host")], 12),
        (("device",), ["flush", ("flush", "device")], 12),
        (("storage",), [("flush", "storage")], 0),
        (("host", "storage"), [("flush", "host", "storage")], 0),
    ],
)
def test_cache_flush_covers_only_the_tiers_in_the_request(names: tuple[str, ...], calls: list[Any], pages: int) -> None:
    async def run() -> tuple[FakeLoop, int]:
        loop = FakeLoop()
        async with control(loop) as stub:
            return loop, (await stub.FlushCache(pb.FlushCacheRequest(tiers=names))).pages

    loop, found = asyncio.run(run())
    assert loop.core.calls == calls and found == pages
    assert loop.executor.applied == [DeleteStored(ALL, Future())] * ("storage" in names)


EVERYWHERE = ("device", "host", "storage")


@pytest.mark.parametrize(
    ("request_", "calls", "deleted", "pages"),
    [
        (pb.FlushCacheRequest(cache_salt="a", tiers=["selected"]), [("forget", "a", *EVERYWHERE)], [Selection(b"tag a")], 12),
        (pb.FlushCacheRequest(cache_salt=""), [("forget", "", *EVERYWHERE)], [Selection(b"tag ")], 12),
        (pb.FlushCacheRequest(cache_salt="a", tiers=["device"]), [("forget", "a", "device")], [], 5),
        (pb.FlushCacheRequest(older_than_s=9.5, tiers=["selected"]), [], [Selection(None, 9.5)], 7),
        (pb.FlushCacheRequest(older_than_s=0, cache_salt="a", tiers=["storage", "selected"]), [], [Selection(b"tag a", 0)], 7),
    ],
)
def test_cache_flush_selects_pages_by_cache_salt_and_age(
    request_: pb.FlushCacheRequest, calls: list[Any], deleted: list[Selection], pages: int
) -> None:
    async def run() -> tuple[FakeLoop, int]:
        loop = FakeLoop()
        async with control(loop) as stub:
            return loop, (await stub.FlushCache(request_)).pages

    loop, found = asyncio.run(run())
    assert loop.core.calls == calls and found == pages
    assert loop.executor.applied == [DeleteStored(which, Future()) for which in deleted]


def refused_flush(request: pb.FlushCacheRequest) -> str:
    """Returns the error message of a refused flush, after a check that no tier was flushed."""

    async def run() -> tuple[FakeLoop, tuple[grpc.StatusCode, str]]:
        loop = FakeLoop()
        async with control(loop) as stub:
            return loop, await status_of(stub.FlushCache(request))

    loop, (code, details) = asyncio.run(run())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert loop.core.calls == loop.executor.applied == []
    return details


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize("age_s", [-1, float("nan"), float("inf")])
def test_cache_flush_is_refused_when_the_age_is_not_a_duration(age_s: float) -> None:
    assert refused_flush(pb.FlushCacheRequest(older_than_s=age_s)).startswith("older_than_s: ")


@pytest.mark.parametrize(
    ("request_", "field_"),
    [
        (pb.FlushCacheRequest(older_than_s=1, tiers=["storage", "host"]), "tiers"),
        (pb.FlushCacheRequest(tiers=["peer"]), "tiers"),
        (pb.FlushCacheRequest(tiers=["device", "selected"]), "tiers"),
        (pb.FlushCacheRequest(cache_salt="x" * 257), "cache_salt"),
    ],
)
def test_cache_flush_is_refused_when_fields_are_invalid_or_contradict_each_other(
    request_: pb.FlushCacheRequest, field_: str
) -> None:
    assert refused_flush(request_).startswith(f"{field_}: ")


@pytest.mark.parametrize(
    ("deleted", "code", "reason"),
    [
        (Deleted(3, (), "the storage does not answer"), grpc.StatusCode.UNAVAILABLE, "will retry: the storage does not answer"),
        (RuntimeError("a fault"), grpc.StatusCode.INTERNAL, "a fault"),
        (None, grpc.StatusCode.DEADLINE_EXCEEDED, "continues"),
    ],
)
def test_cache_flush_fails_when_the_deletion_in_the_storage_does_not_complete(
    deleted: Deleted | Exception | None, code: grpc.StatusCode, reason: str
) -> None:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with control(FakeLoop(executor=FakeExecutor(deleted=deleted))) as stub:
            return await status_of(stub.FlushCache(pb.FlushCacheRequest(cache_salt="a"), timeout=4.0))

    found, details = asyncio.run(run())
    assert found is code and reason in details


def test_cache_flush_is_refused_when_a_tier_is_unknown() -> None:
    async def run() -> tuple[FakeLoop, tuple[grpc.StatusCode, str]]:
        loop = FakeLoop()
        async with control(loop) as stub:
            return loop, await status_of(stub.FlushCache(pb.FlushCacheRequest(tiers=["device", "tape"])))

    loop, (code, details) = asyncio.run(run())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "tape is not one of device, host, storage" in details
    assert loop.core.calls == []


def test_call_with_the_token_succeeds() -> None:
    async def run() -> pb.FlushCacheResponse:
        async with control(FakeLoop(), token=TOKEN) as stub:
            return await stub.FlushCache(pb.FlushCacheRequest(), metadata=(("authorization", f"bearer {TOKEN}"),))

    assert asyncio.run(run()).pages == 12


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "somewhere"])
def test_control_service_needs_a_token_when_the_address_is_not_loopback(host: str) -> None:
    with pytest.raises(ValueError, match="set control_token"):
        asyncio.run(start_control(control_at(host=host, port=1), FakeLoop().put, "w", "m"))


def test_control_service_is_off_when_the_port_is_0() -> None:
    assert asyncio.run(start_control(control_at(), FakeLoop().put, "w", "m")) is None


def test_token_is_read_from_a_file_and_the_error_names_an_unreadable_file(tmp_path: Path) -> None:
    async def run(at: ControlAddress) -> tuple[grpc.StatusCode, str]:
        server = await start_control(at, FakeLoop().put, "w", "m")
        assert server is not None
        async with grpc_server.channel(f"127.0.0.1:{server.port}") as channel:
            await Stub(channel).FlushCache(pb.FlushCacheRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),))
            refused = await status_of(Stub(channel).FlushCache(pb.FlushCacheRequest()))
        await server.stop(0)
        return refused

    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    found = asyncio.run(run(control_at(port=free_ports(1)[0], token_file=str(file))))
    assert found[0] is grpc.StatusCode.UNAUTHENTICATED
    for wrong in (tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match=str(wrong)):
            asyncio.run(run(control_at(port=1, token_file=str(wrong))))
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        asyncio.run(run(control_at(port=1, token_file=str(file))))


def test_command_deadline_leaves_time_for_the_response() -> None:
    async def run() -> list[float]:
        loop, left = FakeLoop(), []
        async with control(loop) as stub:
            for timeout in (1.0, 30.0, None):
                before = time.monotonic()
                await stub.FlushCache(pb.FlushCacheRequest(), timeout=timeout)
                left.append(loop.commands[-1].deadline - before)
        return left

    short, long, none = asyncio.run(run())
    assert 0.5 < short < 0.99, "gRPC rounds deadlines up"
    assert 29.0 < long < 29.9
    assert 3500 < none < 3600


def test_cancelled_call_cancels_the_command() -> None:
    async def run() -> concurrent.futures.Future[Any]:
        loop = FakeLoop(handle=lambda command: None)
        async with control(loop) as stub:
            call = stub.FlushCache(pb.FlushCacheRequest())
            while not loop.commands:
                await asyncio.sleep(0.005)
            call.cancel()
            future = loop.commands[0].future
            while not future.done():
                await asyncio.sleep(0.005)
            return future

    assert asyncio.run(asyncio.wait_for(run(), 20)).cancelled()


def test_internal_state_has_the_values_of_the_scheduler_and_the_worker() -> None:
    async def run() -> dict[str, Any]:
        loop = FakeLoop()
        async with control(loop) as stub:
            await stub.SlowDown(pb.SlowDownRequest(step_delay_s=0.25))
            await stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_IN_PLACE))
            return as_json(await stub.GetInternalState(pb.GetInternalStateRequest()))

    state = asyncio.run(run())
    stats = state.pop("stats")
    assert state == {
        "worker_id": "worker/0",
        "model": "demo",
        "tunables": {"chunk": 128, "mixed": False, "new_token_ratio": 0.5, "policy": "lpm"},
        "paused": True,
        "step_delay_s": 0.25,
        "released": [],
        "profile": "",
        "revision": "",
        "kv_peers": [{"address": "10.0.0.7:8010", "transport": "shm", "bytes_per_second": 5e9}],
    }
    assert (stats["num_running"], stats["new_token_ratio"]) == (3, 0.25)


def test_several_tunables_change_in_one_call_and_keep_their_types() -> None:
    async def run() -> dict[str, Any]:
        async with control(FakeLoop()) as stub:
            return as_json(await stub.SetInternalState(changes(new_token_ratio=1, chunk=64, policy="fcfs")))

    tunables = asyncio.run(run())["tunables"]
    assert tunables == {"chunk": 64, "mixed": False, "new_token_ratio": 1.0, "policy": "fcfs"}
    assert isinstance(tunables["new_token_ratio"], float)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chunks", 64, "chunks: no such tunable. The tunables are chunk, mixed, new_token_ratio, policy"),
        ("chunk", 64.0, "chunk: must be a int, not a float"),
        ("chunk", True, "chunk: must be a int, not a bool"),
        ("mixed", 1, "mixed: must be a bool, not a int"),
        ("new_token_ratio", float("nan"), "new_token_ratio: must be finite"),
        ("policy", "worst", "policy: must be one of fcfs, lpm"),
    ],
)
def test_error_names_an_invalid_tunable_and_no_tunable_changes(name: str, value: Any, message: str) -> None:
    async def run() -> tuple[tuple[grpc.StatusCode, str], dict[str, Any]]:
        loop = FakeLoop()
        async with control(loop) as stub:
            request = changes(**{"new_token_ratio": 0.75, name: value})
            refused = await status_of(stub.SetInternalState(request))
        return refused, loop.core.values

    refused, values = asyncio.run(run())
    assert refused == (grpc.StatusCode.INVALID_ARGUMENT, message)
    assert values == FakeCore().values


@pytest.mark.by_day(one_in=2, seed=45)
@pytest.mark.parametrize(
    ("name", "request_", "field_name"),
    [
        ("SlowDown", pb.SlowDownRequest(step_delay_s=-0.1), "step_delay_s"),
        ("SlowDown", pb.SlowDownRequest(step_delay_s=11), "step_delay_s"),
        ("SlowDown", pb.SlowDownRequest(step_delay_s=float("nan")), "step_delay_s"),
        ("Pause", pb.PauseRequest(), "mode"),
        ("Pause", pb.PauseRequest(mode=9), "mode"),  # type: ignore[arg-type]
        ("SetInternalState", pb.SetInternalStateRequest(tunables={"chunk": pb.Value()}), "no field set"),
        ("StartProfile", pb.StartProfileRequest(name="../x"), "name"),
        ("StartProfile", pb.StartProfileRequest(name=".x"), "name"),
        ("StartProfile", pb.StartProfileRequest(name="x" * 101), "name"),
        ("ReleaseMemory", pb.ReleaseMemoryRequest(tags=[pb.MEMORY_TAG_UNSPECIFIED]), "tags"),
        ("ResumeMemory", pb.ResumeMemoryRequest(tags=[7]), "tags"),  # type: ignore[list-item]
        ("SetLogLevel", pb.SetLogLevelRequest(level="loud"), "level"),
    ],
)
def test_error_names_an_invalid_argument_and_nothing_changes(name: str, request_: Any, field_name: str) -> None:
    async def run() -> tuple[tuple[grpc.StatusCode, str], FakeLoop]:
        loop = FakeLoop()
        async with control(loop) as stub:
            return await status_of(getattr(stub, name)(request_)), loop

    (code, details), loop = asyncio.run(run())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and field_name in details
    assert not loop.core.calls and not loop.executor.applied and not loop.pace.step_delay_s


def test_worker_stays_paused_until_all_released_memory_is_resumed() -> None:
    async def run() -> tuple[list[list[pb.MemoryTag]], FakeLoop]:
        loop, released_lists = FakeLoop(), []
        async with control(loop) as stub:
            released_lists.append(list((await stub.ReleaseMemory(pb.ReleaseMemoryRequest())).released))
            refused = await status_of(stub.Continue(pb.ContinueRequest()))
            assert refused == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "memory is released (kv_cache and weights); call ResumeMemory first",
            )
            weights = pb.ResumeMemoryRequest(tags=[pb.MEMORY_TAG_WEIGHTS])
            released_lists.append(list((await stub.ResumeMemory(weights)).released))
            assert loop.core.paused
            released_lists.append(list((await stub.ResumeMemory(pb.ResumeMemoryRequest())).released))
        return released_lists, loop

    released_lists, loop = asyncio.run(run())
    assert released_lists == [[pb.MEMORY_TAG_KV_CACHE, pb.MEMORY_TAG_WEIGHTS], [pb.MEMORY_TAG_KV_CACHE], []]
    assert loop.core.calls == [PauseMode.ABORT, "reset_memory", "resume"]
    assert loop.executor.applied == [
        ReleaseMemory(kv=True, weights=True),
        ResumeMemory(kv=False, weights=True),
        ResumeMemory(kv=True, weights=False),
    ]


def test_memory_cannot_be_released_twice_or_resumed_without_a_release() -> None:
    async def run() -> FakeLoop:
        loop = FakeLoop()
        async with control(loop) as stub:
            kv = [pb.MEMORY_TAG_KV_CACHE]
            refusals = [await status_of(stub.ResumeMemory(pb.ResumeMemoryRequest()))]
            await stub.ReleaseMemory(pb.ReleaseMemoryRequest(tags=kv))
            refusals.append(await status_of(stub.ReleaseMemory(pb.ReleaseMemoryRequest())))
            refusals.append(await status_of(stub.ResumeMemory(pb.ResumeMemoryRequest(tags=[pb.MEMORY_TAG_WEIGHTS]))))
        code = grpc.StatusCode.FAILED_PRECONDITION
        messages = [
            "nothing to resume: no memory of this worker is released",
            "kv_cache is already released",
            "weights is not released",
        ]
        assert refusals == [(code, message) for message in messages]
        return loop

    assert asyncio.run(run()).executor.applied == [ReleaseMemory(kv=True, weights=False)]


def test_worker_stays_paused_after_resume_when_the_operator_has_requested_a_pause() -> None:
    async def run(pause_first: bool) -> bool:
        loop = FakeLoop()
        async with control(loop) as stub:
            if pause_first:
                await stub.Pause(REQUESTS["Pause"])
            await stub.ReleaseMemory(pb.ReleaseMemoryRequest())
            if not pause_first:
                await stub.Pause(REQUESTS["Pause"])
            await stub.ResumeMemory(pb.ResumeMemoryRequest())
        return loop.core.paused

    assert asyncio.run(run(pause_first=True)) and asyncio.run(run(pause_first=False))


def test_worker_keeps_running_when_the_executor_refuses_to_release() -> None:
    async def run() -> FakeLoop:
        loop = FakeLoop(executor=FakeExecutor(refusal="this model's memory cannot be released"))
        async with control(loop) as stub:
            code, details = await status_of(stub.ReleaseMemory(pb.ReleaseMemoryRequest()))
            assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "this model's memory cannot be released")
            state = await stub.GetInternalState(pb.GetInternalStateRequest())
            assert not state.released
        return loop

    assert not asyncio.run(run()).core.paused


def test_memory_stays_released_when_resume_fails() -> None:
    async def run() -> None:
        loop = FakeLoop()
        async with control(loop) as stub:
            await stub.ReleaseMemory(pb.ReleaseMemoryRequest())
            loop.executor.refusal = "cannot resume: no config.json"
            assert (await status_of(stub.ResumeMemory(pb.ResumeMemoryRequest())))[1] == loop.executor.refusal
            state = await stub.GetInternalState(pb.GetInternalStateRequest())
            assert len(state.released) == 2 and state.paused
            loop.executor.refusal = ""
            await stub.ResumeMemory(pb.ResumeMemoryRequest())
            assert not loop.core.paused

    asyncio.run(run())


def test_profile_path_contains_the_worker_id(tmp_path: Path) -> None:
    async def run() -> FakeLoop:
        loop = FakeLoop()
        async with control(loop, tmp_path / "new") as stub:
            path = (await stub.StartProfile(pb.StartProfileRequest(name="slow"))).path
            assert path == str(tmp_path / "new" / "slow-worker_0.trace.json")
            assert (await stub.GetInternalState(pb.GetInternalStateRequest())).profile == path
            assert "is already running" in (await status_of(stub.StartProfile(pb.StartProfileRequest())))[1]
            assert (await stub.StopProfile(pb.StopProfileRequest())).path == path
            assert "no profile is running" in (await status_of(stub.StopProfile(pb.StopProfileRequest())))[1]
            Path(path).touch()
            assert "exists" in (await status_of(stub.StartProfile(pb.StartProfileRequest(name="slow"))))[1]
            by_time = (await stub.StartProfile(pb.StartProfileRequest())).path
            assert by_time.startswith(f"{tmp_path}/new/2") and by_time.endswith("-worker_0.trace.json")
        return loop

    applied = asyncio.run(run()).executor.applied
    assert [type(operation) for operation in applied] == [StartProfile, StopProfile, StartProfile]


def test_profile_ends_even_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    async def run() -> None:
        loop = FakeLoop()
        async with control(loop, tmp_path) as stub:
            await stub.StartProfile(pb.StartProfileRequest(name="a"))
            loop.executor.refusal = "cannot write: disk full"
            assert (await status_of(stub.StopProfile(pb.StopProfileRequest())))[1] == loop.executor.refusal
            loop.executor.refusal = ""
            await stub.StartProfile(pb.StartProfileRequest(name="b"))

    asyncio.run(run())


def test_log_level_changes_and_returns_the_previous_level() -> None:
    async def run(before: str) -> None:
        async with control(FakeLoop()) as stub:
            assert (await stub.SetLogLevel(pb.SetLogLevelRequest(level="error"))).previous == before
            assert logging.getLogger().level == logging.ERROR
            assert (await stub.SetLogLevel(pb.SetLogLevelRequest(level=before))).previous == "error"

    level = logging.getLogger().level
    try:
        logging.getLogger().setLevel("INFO")
        asyncio.run(run("info"))
    finally:
        logging.getLogger().setLevel(level)


def test_freeze_gc_call_returns_the_number_of_frozen_objects() -> None:
    async def run() -> pb.FreezeGcResponse:
        async with control(FakeLoop()) as stub:
            return await stub.FreezeGc(pb.FreezeGcRequest())

    import gc

    try:
        assert asyncio.run(run()).objects > 1000
    finally:
        gc.unfreeze()


def test_expert_record_counts_between_start_and_stop_and_refuses_calls_out_of_order() -> None:
    async def run() -> list[pb.DumpExpertDistributionRecordResponse]:
        loop = FakeLoop()
        start, stop, dump = (f"{verb}ExpertDistributionRecord" for verb in ("Start", "Stop", "Dump"))
        refused = grpc.StatusCode.FAILED_PRECONDITION
        async with control(loop) as stub:
            assert (await status_of(stub.StopExpertDistributionRecord(REQUESTS[stop])))[0] is refused
            assert (await status_of(stub.DumpExpertDistributionRecord(REQUESTS[dump])))[0] is refused
            await stub.StartExpertDistributionRecord(REQUESTS[start])
            code, details = await status_of(stub.StartExpertDistributionRecord(REQUESTS[start]))
            assert code is refused and "already runs" in details
            plan = replace(idle_plan(()), counts_experts=True, num_extend=1, slots=np.zeros(1, int), num_tokens=np.full(1, 4))
            rows = np.array([[1, 2, 1], [4, 0, 0]], dtype=np.int32)
            loop.core.experts.add(plan, StepResult(1, np.zeros(1, dtype=np.int32), expert_rows=rows))
            dumps = [await stub.DumpExpertDistributionRecord(REQUESTS[dump])]
            await stub.StopExpertDistributionRecord(REQUESTS[stop])
            return [*dumps, await stub.DumpExpertDistributionRecord(REQUESTS[dump])]

    running, ended = map(as_json, asyncio.run(run()))
    assert running.pop("recording") is True and ended.pop("recording") is False
    assert (
        running
        == ended
        == {
            "num_tokens": 4,
            "num_experts_per_tok": 1,
            "logical_count": [{"layer": 0, "counts": [1, 2, 1]}, {"layer": 3, "counts": [4, 0, 0]}],
            "balancedness": pytest.approx((4 / 3 / 2 + 4 / 3 / 4) / 2),
        }
    )


def test_expert_record_is_refused_when_the_model_has_no_experts() -> None:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with control(FakeLoop(core=FakeCore(experts=ExpertRecord(None)))) as stub:
            return await status_of(stub.StartExpertDistributionRecord(pb.StartExpertDistributionRecordRequest()))

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "experts" in details
