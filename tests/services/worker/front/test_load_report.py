"""Tests of load reports: their content, and when gateway streams receive them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.plan import StepResult
from rootstock_llm.services.worker.exec.contracts.protocol import Run
from rootstock_llm.services.worker.front.outbox import GAP_S, LoadReport, NoIndex, StreamOutbox
from rootstock_llm.services.worker.loop.progress import Pulse, StepLimit
from tests.services.worker.conftest import CAP_S, CONFIG, run, serving
from tests.services.worker.front.test_server import FakeGateway, submit


async def until_load(gateway: FakeGateway, holds: Callable[[worker_pb2.WorkerLoad], bool]) -> worker_pb2.WorkerLoad:
    seen = len(gateway.loads)
    await gateway.until(lambda: any(holds(load) for load in gateway.loads[seen:]))
    return next(load for load in gateway.loads[seen:] if holds(load))


def test_load_report_follows_the_hello_message_and_repeats_when_the_worker_is_idle() -> None:
    async def check() -> None:
        async with serving(gap_s=0.02, beat_s=0.1) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            assert await gateway.next() and len(gateway.loads) == 1, "the second message is a load"
            await gateway.until(lambda: len(gateway.loads) >= 4)
            assert gateway.messages == 0
            assert gateway.loads[-1] == worker_pb2.WorkerLoad(index_generation=5, step_limit_ms=int(CAP_S * 1e3))

    run(check)


def test_load_report_counts_the_requests_of_the_stream_and_of_all_streams() -> None:
    async def check() -> None:
        async with serving(step_s=0.02, config=replace(CONFIG, max_running_requests=2)) as worker:
            mine, other = FakeGateway(worker.stub), FakeGateway(worker.stub)
            await mine.hello()
            await other.hello()
            await mine.send(*[submit(handle, [handle] * 8, max_new_tokens=100) for handle in range(3)])
            await other.send(submit(7, [9] * 8, max_new_tokens=100))
            load = await until_load(mine, lambda load: (load.num_running, load.num_waiting) == (2, 2))
            assert (load.num_open, load.num_open_here) == (4, 3)
            assert load.used_tokens >= 2 * 8 + 2 * 8, "the tokens of running and waiting requests"
            load = await until_load(other, lambda load: (load.num_running, load.num_waiting) == (2, 2))
            assert (load.num_open, load.num_open_here) == (4, 1)
            await mine.send(aborts=(0, 1, 2))
            await other.send(aborts=(7,))
            load = await until_load(mine, lambda load: load.num_open == 0 and load.num_running == 0)
            assert load.used_tokens == 0 and load.cached_tokens > 0 and load.num_open_here == 0

    run(check)


def test_load_report_is_sent_during_a_long_step() -> None:
    async def check() -> None:
        async with serving(step_s=2.0, gap_s=0.02, beat_s=0.1) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, max_new_tokens=2))
            await gateway.until(lambda: bool(gateway.tokens.get(1)))
            while_computing = len([load for load in gateway.loads if load.num_open == 1])
            assert while_computing >= 2
            await gateway.send(aborts=(1,))
            await gateway.ended(1)

    run(check)


def test_load_report_is_not_sent_for_every_step() -> None:
    async def check() -> None:
        async with serving(step_s=0.001) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            started = asyncio.get_running_loop().time()
            await gateway.send(*[submit(handle, [handle] * 8, max_new_tokens=60) for handle in range(8)])
            await gateway.ended(*range(8))
            passed = asyncio.get_running_loop().time() - started
            assert len(gateway.loads) <= passed / GAP_S + 3 < gateway.messages

    run(check)


def test_load_report_has_the_age_of_a_hung_step() -> None:
    async def check() -> None:
        async with serving(gap_s=0.02, beat_s=0.05) as worker:
            ends, wait = threading.Event(), worker.executor.wait

            def hang(run: Run) -> StepResult:
                ends.wait(60)
                return wait(run)

            worker.executor.wait = hang  # type: ignore[method-assign]
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, max_new_tokens=3))
            try:
                young = await until_load(gateway, lambda load: load.step_age_ms > 0)
                old = await until_load(gateway, lambda load: load.step_age_ms > young.step_age_ms + 200)
                assert old.num_open == 1 and old.step_limit_ms > 0
            finally:
                ends.set()
            await gateway.ended(1)
            assert (await until_load(gateway, lambda load: load.num_open == 0 and load.step_age_ms == 0)).step_limit_ms >= 10_000

    run(check)


def test_load_report_is_not_sent_when_only_the_step_age_changes() -> None:
    async def check() -> None:
        now = 0.0
        outbox, pulse = StreamOutbox(asyncio.get_running_loop()), Pulse(lambda: now)
        report = LoadReport(outbox, 4, NoIndex(1), pulse, StepLimit(lambda: CONFIG, float("inf"), CAP_S), beat_s=3600)
        stream = outbox.open(1)
        pulse.beat()
        report.send_first(stream)
        message = await stream.take()
        assert message is not None and message.load.step_age_ms == 0
        now = 7.0
        report.send_due()
        stream.opened(1)
        report.send_due()
        message = await stream.take()
        assert message is not None and (message.load.num_open, message.load.step_age_ms) == (1, 7000)
        stream.end()
        assert await stream.take() is None

    run(check)


def idle() -> tuple[Pulse, StepLimit]:
    return Pulse(), StepLimit(lambda: CONFIG, float("inf"), CAP_S)


@dataclass
class Index:
    lease_held: bool = False  # whether the worker holds its lease in the index
    generation: int = 3  # generation of the worker in the index
    seq: int = 0  # sequence number of the last event batch


def test_load_report_has_the_state_of_the_prefix_index() -> None:
    async def check() -> None:
        index = Index()
        outbox = StreamOutbox(asyncio.get_running_loop())
        report = LoadReport(outbox, 4, index, *idle())
        stream = outbox.open(1)
        report.send_first(stream)
        assert stream.reported is not None
        assert (stream.reported.lease_held, stream.reported.index_generation, stream.reported.index_seq) == (False, 3, 0)
        index.lease_held, index.generation, index.seq = True, 4, 9
        report.send_due()
        assert (stream.reported.lease_held, stream.reported.index_generation, stream.reported.index_seq) == (True, 4, 9)

    run(check)


def test_load_report_has_only_measured_savings_of_the_kv_tiers() -> None:
    """Unmeasured values are unset, because 0 is a value and gateways use a default for unset ones."""

    async def check() -> None:
        outbox = StreamOutbox(asyncio.get_running_loop())
        report = LoadReport(outbox, 4, NoIndex(1), *idle())
        for saves in ((None, None), (0.75, None), (0.0, 0.5)):
            shares = dict(zip(("host_saves", "storage_saves"), saves, strict=True))
            report.iteration_ended(StepStats(**dict.fromkeys(StepStats.__dataclass_fields__, 0) | shares))  # type: ignore[arg-type]
            report.send_first(stream := outbox.open(1))
            message = await stream.take()
            assert message is not None
            load = message.load
            assert shares == {name: getattr(load, name) if load.HasField(name) else None for name in shares}
            stream.end()
            assert await stream.take() is None

    run(check)


def test_slow_gateway_stream_receives_only_the_latest_load_report() -> None:
    async def check() -> None:
        outbox = StreamOutbox(asyncio.get_running_loop())
        report = LoadReport(outbox, 4, NoIndex(1), *idle())
        stream = outbox.open(1)
        for handle in range(50):
            stream.opened(handle)
            report.send_due()
        message = await stream.take()
        assert message is not None and message.load.num_open_here == 50
        stream.end()
        assert await stream.take() is None

    run(check)
