"""Tests of the order in which an operation reaches the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from rootstock_llm.services.gateway.admin.bodies import AdminBody, ClearStorage, FlushCache, Pause
from rootstock_llm.services.gateway.admin.operations import AdminOperation, AdminOperations
from rootstock_llm.services.gateway.admin.workers import KnownWorker, WorkerResult


class Workers:
    """A directory of three workers. `calls` records the worker ids of each call."""

    def __init__(self) -> None:
        roles = {"a": "decode", "b": "prefill", "c": ""}
        links = {name: cast(Any, SimpleNamespace(info=SimpleNamespace(role=role))) for name, role in roles.items()}
        self.known = [KnownWorker(name, name, name, link=link) for name, link in links.items()]
        self.calls: list[list[str]] = []

    def find(self, _name: str | None) -> list[KnownWorker]:
        return self.known

    async def call(self, workers: Sequence[KnownWorker], _rpc: str, _request: Message, _timeout_s: float) -> list[WorkerResult]:
        self.calls.append([worker.worker_id for worker in workers])
        return [WorkerResult(worker, {}) for worker in workers]


@pytest.mark.parametrize(
    ("body", "calls"),
    [(FlushCache(cache_salt="s"), [["b"], ["a", "c"]]), (ClearStorage(), [["b"], ["a", "c"]]), (Pause(), [["a", "b", "c"]])],
    ids=["flush", "clear storage", "pause"],
)
def test_flush_reaches_prefill_workers_first(body: AdminBody, calls: list[list[str]]) -> None:
    workers = Workers()
    operations = AdminOperations(cast(Any, workers), cast(Any, workers), cast(Any, None), 1.0)
    status, answer = asyncio.run(operations.run(AdminOperation("FlushCache", type(body)), body))
    assert status == 200 and workers.calls == calls
    assert sorted(each["worker"] for each in answer["workers"]) == ["a", "b", "c"]
