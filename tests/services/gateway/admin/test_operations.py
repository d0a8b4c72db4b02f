"""The order in which an operation reaches the workers."""

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
    """A directory of three workers, which records the calls to them."""

    def __init__(self) -> None:
        roles = {"a": "decode", "b": "prefill", "c": ""}
        links = {name: cast(Any, SimpleNamespace(info=SimpleNamespace(role=role))) for name, role in roles.items()}
        self.known = [KnownWorker(name, name, name, link=link) for name, link in links.items()]
        self.turns: list[list[str]] = []

    def find(self, _name: str | None) -> list[KnownWorker]:
        return self.known

    async def ask(self, some: Sequence[KnownWorker], _rpc: str, _request: Message, _timeout_s: float) -> list[WorkerResult]:
        self.turns.append([worker.worker_id for worker in some])
        return [WorkerResult(worker, {}) for worker in some]


@pytest.mark.parametrize(
    ("body", "turns"),
    [(FlushCache(cache_salt="s"), [["b"], ["a", "c"]]), (ClearStorage(), [["b"], ["a", "c"]]), (Pause(), [["a", "b", "c"]])],
    ids=["flush", "clear", "another"],
)
def test_flush_reaches_prefill_workers_first(body: AdminBody, turns: list[list[str]]) -> None:
    workers = Workers()
    operations = AdminOperations(cast(Any, workers), cast(Any, workers), cast(Any, None), 1.0)
    status, answer = asyncio.run(operations.run(AdminOperation("FlushCache", type(body)), body))
    assert status == 200 and workers.turns == turns
    assert sorted(each["worker"] for each in answer["workers"]) == ["a", "b", "c"]
