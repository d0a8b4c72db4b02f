"""Tests of the pool of rendering processes: cancelled requests, and processes that do not start."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from rootstock_llm.protos import tokenizer_pb2 as pb
from rootstock_llm.services.tokenizer import render_pool
from rootstock_llm.services.tokenizer.metrics import TokenizerMetrics
from rootstock_llm.services.tokenizer.refusal import Refusal
from rootstock_llm.services.tokenizer.render_pool import LARGE_BYTES, RenderPool, RenderSetup

# A template that renders for longer than the test needs to cancel requests
SLOW = "{% for i in range(60) %}{% for j in range(4000) %}{% set x = i * j %}{% endfor %}{% endfor %}"
CREATE_PROCESS = asyncio.create_subprocess_exec


def request(text: str = "hi") -> pb.EncodeChatRequest:
    return pb.EncodeChatRequest(messages_json=json.dumps([{"role": "user", "content": text}]).encode())


@asynccontextmanager
async def pool(before: str = "", registry: CollectorRegistry | None = None) -> AsyncIterator[RenderPool]:
    setup = RenderSetup({"default": before + "{{ messages[0].content }}"}, {}, 1 << 20, 100, 1 << 29, 30.0)
    made = RenderPool(setup, 1, TokenizerMetrics(registry or CollectorRegistry()))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def start_killed(*args: Any, **options: Any) -> asyncio.subprocess.Process:
    process = await CREATE_PROCESS(*args, **options)
    process.kill()
    return process


async def fail_to_start(*args: Any, **options: Any) -> asyncio.subprocess.Process:
    raise BlockingIOError(11, "Resource temporarily unavailable")


async def refusal_code(asked: Coroutine[Any, Any, str]) -> grpc.StatusCode:
    with pytest.raises(Refusal) as refusal:
        await asked
    return refusal.value.code


def test_pool_does_not_render_requests_cancelled_in_the_queue() -> None:
    async def run() -> None:
        async with pool(SLOW, registry := CollectorRegistry()) as renderers:
            order: list[str] = []

            async def ask(name: str) -> None:
                order.append(await renderers.render(request(name)))

            first = asyncio.create_task(ask("first"))
            await asyncio.sleep(0)
            cancelled = [asyncio.create_task(ask("left")) for _ in range(20)]
            await asyncio.sleep(0.01)
            last = asyncio.create_task(ask("last"))
            for task in cancelled:
                task.cancel()
            await asyncio.gather(first, last, *cancelled, return_exceptions=True)
            assert order == ["first", "last"]
            rendered = registry.get_sample_value("rootstock_tokenizer_render_seconds_count")
            assert rendered == 2, "cancelled requests are not rendered"

    asyncio.run(run())


@pytest.mark.parametrize("start", [start_killed, fail_to_start])
def test_pool_retries_after_a_failed_first_start(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    async def run() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        async with pool() as renderers:
            monkeypatch.setattr(asyncio, "create_subprocess_exec", CREATE_PROCESS)
            assert await refusal_code(renderers.render(request())) is grpc.StatusCode.FAILED_PRECONDITION, (
                "the template may take too long to compile"
            )
            later = asyncio.get_running_loop().time() + render_pool.RETRY_S
            monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: later)
            assert await renderers.render(request()) == "hi"

    asyncio.run(run())


def test_pool_starts_one_process_when_many_requests_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        started: list[int] = []

        async def counted(*args: Any, **options: Any) -> asyncio.subprocess.Process:
            started.append(1)
            return await start_killed(*args, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)
        async with pool() as renderers:
            renderers._retry_at = asyncio.get_running_loop().time()
            refusals = await asyncio.gather(*(renderers.render(request()) for _ in range(10)), return_exceptions=True)
            assert all(isinstance(refusal, Refusal) for refusal in refusals)
            assert len(started) == 2, "one process starts with the pool and one for all requests"

    asyncio.run(run())


@pytest.mark.parametrize("start", [start_killed, fail_to_start])
def test_pool_reports_busy_when_a_replacement_process_does_not_start(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    async def run() -> None:
        async with pool() as renderers:
            monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
            text = "x" * LARGE_BYTES
            assert await renderers.render(request(text)) == text, (
                "a rendered text is returned although no process replaces the ended one"
            )
            assert await refusal_code(renderers.render(request())) is grpc.StatusCode.ABORTED
            monkeypatch.setattr(asyncio, "create_subprocess_exec", CREATE_PROCESS)
            assert await renderers.render(request()) == "hi"

    asyncio.run(run())


def test_rendering_process_has_a_separate_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux divides CPU time between sessions first, so a process in a busy session could exceed the time limit of a start."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await CREATE_PROCESS(*args, **options))
        return started[-1]

    async def run() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        async with pool():
            (pid,) = [process.pid for process in started]
            assert os.getsid(pid) == pid

    asyncio.run(run())
