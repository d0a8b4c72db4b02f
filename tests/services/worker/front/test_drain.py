"""Tests of a drain: running requests may end, unfinished requests are returned with all tokens, and new requests are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from rootstock_llm.protos import common_pb2, worker_pb2, worker_pb2_grpc
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation, ReservationReleased
from rootstock_llm.services.worker.front.drain import drain
from tests.services.worker.conftest import Serving, run, serving
from tests.services.worker.front.test_server import LENGTH, FakeGateway, expected, submit

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
UNAVAILABLE = common_pb2.ERROR_CODE_UNAVAILABLE
GUARD_S = 180.0


async def draining(worker: Serving, grace_s: float) -> asyncio.Task[None]:
    task = asyncio.create_task(drain(worker.outbox, worker.load, worker.scheduler, grace_s))
    await asyncio.sleep(0)
    return task


async def read_to_end(gateway: FakeGateway) -> None:
    async with asyncio.timeout(GUARD_S):
        while await gateway.next():
            pass


def test_drain_finishes_running_requests_and_refuses_new_requests() -> None:
    async def check() -> None:
        async with serving(step_s=0.005) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, max_new_tokens=60))
            await gateway.until(lambda: len(gateway.tokens[1]) > 2)
            task = await draining(worker, GUARD_S)
            await gateway.until(lambda: any(load.draining for load in gateway.loads))
            assert 1 not in gateway.finishes
            await gateway.send(submit(2))
            refused = await worker.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="s"))
            assert not refused.opened and "stopping" in refused.message
            await read_to_end(gateway)
            await task
            assert (gateway.finishes[2].error, gateway.tokens.get(2)) == (UNAVAILABLE, None)
            assert gateway.finishes[1].reason == LENGTH
            assert gateway.tokens[1] == expected([1, 2, 3], 60)

    run(check)


def test_drain_waits_for_kv_reservations() -> None:
    async def check() -> None:
        async with serving(step_s=0.005) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            core = worker.core
            reservation = KvReservation(1, 1, bytes(RESERVATION_SECRET_BYTES))
            ids = np.arange(40, dtype=np.int32)
            worker.inbox.put(Submit(1, 99, "r", ids, SamplingParams(max_new_tokens=9, ignore_eos=True), hand_over=reservation))
            async with asyncio.timeout(GUARD_S):
                while not worker.load.num_reservations:
                    await asyncio.sleep(0.01)
            task = await draining(worker, GUARD_S)
            await asyncio.sleep(0.2)
            assert not task.done() and core.stats().num_rooms == 1
            worker.inbox.put(ReservationReleased(reservation, worker.executor.open_reservations[1].opening))
            async with asyncio.timeout(GUARD_S):
                await task

    run(check)


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_drain_returns_unfinished_requests_with_all_sampled_tokens(stream: bool, overlap: bool) -> None:
    async def check() -> None:
        async with serving(step_s=0.01, overlap=overlap) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, stream=stream, max_new_tokens=250))
            await gateway.until(lambda: len(gateway.tokens[1]) > 5)
            await (await draining(worker, 0.1))
            await read_to_end(gateway)
            finish, tokens = gateway.finishes[1], gateway.tokens[1]
            assert finish.error == UNAVAILABLE
            assert tokens == expected([1, 2, 3], len(tokens)) and 5 < len(tokens) < 250
            assert finish.completion_tokens == len(tokens) == worker.counts.steps, "the tokens of the step in flight are included"

    run(check)


def test_drained_request_continues_on_another_worker() -> None:
    async def check() -> None:
        async with serving(step_s=0.01) as first, serving() as second:
            gateway, other = FakeGateway(first.stub), FakeGateway(second.stub)
            await gateway.hello()
            await other.hello()
            await gateway.send(submit(1, max_new_tokens=200))
            await gateway.until(lambda: len(gateway.tokens[1]) > 3)
            await (await draining(first, 0.1))
            await read_to_end(gateway)
            given = gateway.tokens[1]
            again = submit(1, max_new_tokens=200)
            again.output_ids.extend(given)
            await other.send(again)
            await other.ended(1)
            assert given + other.tokens[1] == expected([1, 2, 3], 200)
            finish = other.finishes[1]
            assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == (LENGTH, 3, 200)

    run(check)


def test_drain_of_an_idle_worker_ends_streams_at_once() -> None:
    async def check() -> None:
        async with serving() as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            async with asyncio.timeout(GUARD_S / 2):
                await (await draining(worker, GUARD_S))
            await read_to_end(gateway)
            assert worker.scheduler.ended and gateway.loads[-1].draining

    run(check)


def test_second_signal_ends_the_drain() -> None:
    async def check() -> None:
        async with serving(step_s=0.05) as worker:
            gateway = FakeGateway(worker.stub)
            await gateway.hello()
            await gateway.send(submit(1, max_new_tokens=250))
            await gateway.until(lambda: bool(gateway.tokens[1]))
            task = await draining(worker, 10 * GUARD_S)
            await gateway.until(lambda: any(load.draining for load in gateway.loads))
            os.kill(os.getpid(), signal.SIGTERM)
            await read_to_end(gateway)
            await task
            assert gateway.finishes[1].error == UNAVAILABLE and len(gateway.tokens[1]) < 250

    run(check)


@asynccontextmanager
async def process(step_s: float, grace_s: float) -> AsyncIterator[tuple[Process, FakeGateway]]:
    port, metrics_port = free_ports(2)
    flags = ["--executor", "fake", "--model", DEMO, "--port", port, "--metrics-port", metrics_port]
    flags += ["--fake-step-s", step_s, "--grace-s", grace_s, "--grammar-workers", 0]
    argv = [sys.executable, "-m", "rootstock_llm.services.worker", *map(str, flags)]
    worker = await asyncio.create_subprocess_exec(*argv, stderr=subprocess.PIPE)
    try:
        async with grpc_server.channel(f"{HOST}:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), GUARD_S)
            gateway = FakeGateway(worker_pb2_grpc.WorkerStub(channel))
            await gateway.hello()
            yield worker, gateway
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


def test_process_returns_unfinished_requests_and_exits_after_sigterm() -> None:
    async def check() -> None:
        async with process(step_s=0.02, grace_s=0.3) as (worker, gateway):
            await gateway.send(submit(1, max_new_tokens=2000))
            await gateway.until(lambda: len(gateway.tokens[1]) > 3)
            worker.send_signal(signal.SIGTERM)
            await read_to_end(gateway)
            assert (gateway.finishes[1].error, gateway.finishes[1].completion_tokens) == (UNAVAILABLE, len(gateway.tokens[1]))
            errors = (await asyncio.wait_for(worker.communicate(), GUARD_S))[1].decode()
            assert worker.returncode == 0 and "Traceback" not in errors, errors

    run(check)


def test_process_returns_all_requests_and_exits_after_sigterm_when_a_step_hangs() -> None:
    async def check() -> None:
        async with process(step_s=10 * GUARD_S, grace_s=0.1) as (worker, gateway):
            await gateway.send(submit(1))
            await gateway.until(lambda: any(load.num_running == 1 for load in gateway.loads))
            worker.send_signal(signal.SIGTERM)
            await read_to_end(gateway)
            assert gateway.finishes[1].error == UNAVAILABLE
            errors = (await asyncio.wait_for(worker.communicate(), GUARD_S))[1].decode()
            assert worker.returncode == 70 and "has not ended" in errors, errors

    run(check)
