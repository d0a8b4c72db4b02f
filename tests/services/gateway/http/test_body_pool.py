"""The order in which bodies get bytes of the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rootstock_llm.services.gateway.generation.bodies import BodyPool, BodyReservation, Stuck


def looping(test: Callable[[BodyPool], None]) -> None:
    async def run() -> None:
        test(BodyPool(100))

    asyncio.run(run())


def granted(*places: BodyReservation) -> list[bool]:
    return [place.room.done() for place in places]


def test_budget_serves_in_order_even_when_a_later_request_fits() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(60)
        large, small = pool.join(90), pool.join(10)
        assert not pool.take(10) and granted(large, small) == [False, False]
        pool.give(60)
        assert granted(large, small) == [True, True] and pool.held == 100

    looping(use)


def test_budget_prefers_bodies_that_hold_bytes() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(50) and pool.take(50)
        new, growing = pool.join(20), pool.join(40, holds=50)
        pool.give(50)
        assert granted(new, growing) == [False, True]
        pool.give(90)
        assert granted(new) == [True] and pool.held == 20

    looping(use)


def test_budget_does_not_wait_for_waiting_bodies() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(50) and pool.take(50)
        first = pool.join(10, holds=50)
        with pytest.raises(Stuck):
            pool.join(10, holds=50)
        pool.give(50)  # as the second must
        assert granted(first) == [True]

    looping(use)


def test_budget_refuses_at_once_when_one_body_holds_all() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(100)
        with pytest.raises(Stuck):
            pool.join(1, holds=100)

    looping(use)


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "given"])
def test_budget_serves_the_next_body_when_a_waiting_one_leaves(given: bool) -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(60)
        first, second = pool.join(90), pool.join(40)
        if given:
            pool.give(60)
        pool.leave(first)
        assert granted(second) == [True] and pool.held == (40 if given else 100) and pool.num_waiting == 0

    looping(use)
