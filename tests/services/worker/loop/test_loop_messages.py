"""Tests of the loop's messages: cancelled calls, messages after Stop, and cache events."""

from __future__ import annotations

import asyncio
import concurrent.futures

import grpc
import numpy as np
import pytest

from rootstock_llm.protos import common_pb2, worker_pb2
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.loop.inbox import (
    Barrier,
    CloseSession,
    Command,
    GrammarFailed,
    GrammarReady,
    LoopEnded,
    OpenSession,
    Stop,
)
from tests.services.worker.conftest import Serving, run, serving
from tests.services.worker.front.test_server import FakeGateway, submit


async def connected_gateway(at: Serving) -> FakeGateway:
    gateway = FakeGateway(at.stub)
    await gateway.hello()
    return gateway


async def reads_messages(at: Serving) -> bool:
    """Returns whether the loop opens and closes a session, and therefore still reads messages."""
    opened = await at.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="alive"))
    closed = await at.stub.CloseSession(worker_pb2.CloseSessionRequest(session_id="alive"))
    return bool(opened.opened and closed.closed)


def test_loop_ignores_cancelled_session_calls() -> None:
    async def check() -> None:
        async with serving() as at:
            refusal: concurrent.futures.Future[str] = concurrent.futures.Future()
            closed: concurrent.futures.Future[bool] = concurrent.futures.Future()
            refusal.cancel()
            closed.cancel()
            at.inbox.put(OpenSession("s", 0, 0.0, refusal))
            at.inbox.put(CloseSession("s", closed))
            assert await reads_messages(at)
            assert at.core.stats().num_sessions == 0, "a cancelled call opens no session"

    run(check)


def test_open_session_call_returns_the_reason_of_a_refusal() -> None:
    async def check() -> None:
        async with serving() as at:
            first = await at.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="s"))
            again = await at.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="s"))
            nameless = await at.stub.OpenSession(worker_pb2.OpenSessionRequest())
            long = await at.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="x" * 300))
            assert first.opened and not (again.opened or nameless.opened or long.opened)
            assert "is already open" in again.message and "id" in nameless.message and "256" in long.message
            assert not (await at.stub.CloseSession(worker_pb2.CloseSessionRequest(session_id="t"))).closed

    run(check)


def test_loop_ignores_results_of_unknown_grammars() -> None:
    async def check() -> None:
        async with serving() as at:
            at.inbox.put(GrammarReady(GrammarSpec(GrammarKind.REGEX, "a")))
            at.inbox.put(GrammarFailed(GrammarSpec(GrammarKind.REGEX, "a"), "no"))
            assert await reads_messages(at)

    run(check)


def test_grammar_is_refused_when_the_worker_has_no_grammar_compiler() -> None:
    async def check() -> None:
        async with serving() as at:
            gateway = await connected_gateway(at)
            await gateway.send(submit(1, grammar=common_pb2.Grammar(regex="a")))
            await gateway.ended(1)
            assert gateway.finishes[1].error == common_pb2.ERROR_CODE_INVALID_ARGUMENT
            assert gateway.finishes[1].field == "grammar"

    run(check)


@pytest.mark.parametrize("late", ["submit", "session", "command"])
def test_messages_after_a_stop_message_still_get_a_result(late: str) -> None:
    async def check() -> None:
        async with serving() as at:
            gateway = await connected_gateway(at)
            refusal: concurrent.futures.Future[str] = concurrent.futures.Future()
            done: concurrent.futures.Future[int] = concurrent.futures.Future()
            await gateway.send(submit(1, max_new_tokens=200))
            await gateway.until(lambda: bool(gateway.tokens.get(1)))
            at.inbox.put(Stop())
            if late == "submit":
                at.inbox.put(Submit(1, 2, "r2", np.array([5], dtype=np.int32), SamplingParams(3)))
                await gateway.ended(2)
                assert gateway.finishes[2].error == common_pb2.ERROR_CODE_UNAVAILABLE
            elif late == "session":
                at.inbox.put(OpenSession("s", 0, 0.0, refusal))
                assert "stopping" in await asyncio.wait_for(asyncio.wrap_future(refusal), 60)
            else:
                at.inbox.put(Command(Barrier.IDLE, lambda core, executor, pace: 1, done, float("inf")))
                with pytest.raises(LoopEnded):
                    await asyncio.wait_for(asyncio.wrap_future(done), 60)
            await gateway.ended(1)
            assert gateway.finishes[1].error == common_pb2.ERROR_CODE_UNAVAILABLE

    run(check)


def test_newly_cached_blocks_are_counted() -> None:
    async def check() -> None:
        async with serving() as at:
            gateway = await connected_gateway(at)
            at.core.events = at.core.memory.tree._events = CacheEventLog(4, lambda link, ids: ids[:8], str.encode)
            await gateway.send(submit(1, list(range(130))))
            await gateway.ended(1)
            assert at.counts.stored_blocks == 2

    run(check)


def test_timed_out_call_affects_no_other_request() -> None:
    async def check() -> None:
        async with serving(step_s=0.2) as at:
            gateway = await connected_gateway(at)
            await gateway.send(submit(1, max_new_tokens=3))
            with pytest.raises(grpc.aio.AioRpcError):
                for _ in range(50):
                    await at.stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="s"), timeout=0.0005)
            await gateway.ended(1)
            assert await reads_messages(at)

    run(check)
