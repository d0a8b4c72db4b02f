"""Tests of ByteBudget: requests get their bytes in the order of arrival, and release them exactly once."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from rootstock_llm.services.tokenizer.memory import ByteBudget
from rootstock_llm.services.tokenizer.refusal import Refusal


class Holder:
    """A task that has reserved bytes until `leave` is set."""

    def __init__(self, budget: ByteBudget, size: int, order: list[int]) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(budget, size, order))

    async def _run(self, budget: ByteBudget, size: int, order: list[int]) -> None:
        async with budget.share(size):
            order.append(size)
            await self.leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_budget_serves_requests_in_order_of_arrival() -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 60.0), list[int]()
        first, large, small = (Holder(budget, size, order) for size in (6, 7, 2))
        await settle()
        assert (order, budget.used) == ([6], 6)
        first.leave.set()
        await settle()
        assert (order, budget.used) == ([6, 7, 2], 9)
        for one in (large, small):
            one.leave.set()
        await asyncio.gather(first.task, large.task, small.task)
        assert budget.used == 0

    asyncio.run(run())


def test_budget_admits_a_request_larger_than_the_budget_only_when_no_other_runs() -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 60.0), list[int]()
        small, huge, other = (Holder(budget, size, order) for size in (1, 1000, 3))
        await settle()
        assert order == [1]
        small.leave.set()
        await settle()
        assert (order, budget.used) == ([1, 1000], 10)
        huge.leave.set()
        await settle()
        assert order == [1, 1000, 3]
        other.leave.set()
        await asyncio.gather(small.task, huge.task, other.task)

    asyncio.run(run())


def test_budget_refuses_a_request_after_the_maximum_wait() -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 0.02), list[int]()
        first = Holder(budget, 10, order)
        await settle()
        with pytest.raises(Refusal) as refused:
            async with budget.share(1):
                raise AssertionError("the budget is full")
        assert refused.value.code is grpc.StatusCode.ABORTED
        first.leave.set()
        await first.task
        assert budget.used == 0

    asyncio.run(run())


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("ticks", [0, 1, 2, 3])
def test_budget_releases_the_bytes_of_a_cancelled_request(ticks: int) -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 60.0), list[int]()
        first, gone, last = (Holder(budget, size, order) for size in (10, 8, 9))
        await settle()
        first.leave.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        gone.task.cancel()
        await settle()
        assert (order[-1], budget.used) == (9, 9)
        last.leave.set()
        await asyncio.gather(first.task, gone.task, last.task, return_exceptions=True)
        assert budget.used == 0

    asyncio.run(run())
