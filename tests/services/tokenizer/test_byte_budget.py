"""Shares in order of arrival; each is given back once, whatever becomes of its caller."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from services.tokenizer.byte_budget import ByteBudget
from services.tokenizer.refusal import Refusal


class Holder:
    """Takes a share, and keeps it until it is told to go."""

    def __init__(self, budget: ByteBudget, size: int, order: list[int]) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(budget, size, order))

    async def _run(self, budget: ByteBudget, size: int, order: list[int]) -> None:
        async with budget.hold(size):
            order.append(size)
            await self.leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_first_come_first_served_and_nobody_overtakes() -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 60.0), list[int]()
        first, large, small = (Holder(budget, size, order) for size in (6, 7, 2))
        await settle()
        assert (order, budget.held) == ([6], 6)
        first.leave.set()
        await settle()
        assert (order, budget.held) == ([6, 7, 2], 9)
        for one in (large, small):
            one.leave.set()
        await asyncio.gather(first.task, large.task, small.task)
        assert budget.held == 0

    asyncio.run(run())


def test_what_is_larger_than_all_of_it_is_alone() -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 60.0), list[int]()
        small, huge, other = (Holder(budget, size, order) for size in (1, 1000, 3))
        await settle()
        assert order == [1]
        small.leave.set()
        await settle()
        assert (order, budget.held) == ([1, 1000], 10)
        huge.leave.set()
        await settle()
        assert order == [1, 1000, 3]
        other.leave.set()
        await asyncio.gather(small.task, huge.task, other.task)

    asyncio.run(run())


def test_it_stays_full() -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 0.02), list[int]()
        first = Holder(budget, 10, order)
        await settle()
        with pytest.raises(Refusal) as refused:
            async with budget.hold(1):
                raise AssertionError("there is no room")
        assert refused.value.code is grpc.StatusCode.ABORTED
        first.leave.set()
        await first.task
        assert budget.held == 0

    asyncio.run(run())


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("ticks", [0, 1, 2, 3])
def test_a_caller_that_goes_away_leaves_nothing(ticks: int) -> None:
    async def run() -> None:
        budget, order = ByteBudget(10, 60.0), list[int]()
        first, gone, last = (Holder(budget, size, order) for size in (10, 8, 9))
        await settle()
        first.leave.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        gone.task.cancel()
        await settle()
        assert (order[-1], budget.held) == (9, 9)
        last.leave.set()
        await asyncio.gather(first.task, gone.task, last.task, return_exceptions=True)
        assert budget.held == 0

    asyncio.run(run())
