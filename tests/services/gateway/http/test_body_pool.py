"""Tests of BodyPool: the order in which bodies get bytes of the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rootstock_llm.services.gateway.generation.bodies import BodyPool, BodyReservation, Stuck


def run_on_loop(test: Callable[[BodyPool], None]) -> None:
    async def run() -> None:
        test(BodyPool(100))

    asyncio.run(run())


def granted(*reservations: BodyReservation) -> list[bool]:
    return [reservation.room.done() for reservation in reservations]


def test_budget_serves_in_order_even_when_a_later_request_fits() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(60)
        large, small = pool.join(90), pool.join(10)
        assert not pool.take(10) and granted(large, small) == [False, False]
        pool.give(60)
        assert granted(large, small) == [True, True] and pool.held == 100

    run_on_loop(use)


def test_budget_serves_bodies_that_have_bytes_first() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(50) and pool.take(50)
        new, growing = pool.join(20), pool.join(40, holds=50)
        pool.give(50)
        assert granted(new, growing) == [False, True]
        pool.give(90)
        assert granted(new) == [True] and pool.held == 20

    run_on_loop(use)


def test_budget_refuses_a_body_when_all_other_bytes_belong_to_waiting_bodies() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(50) and pool.take(50)
        first = pool.join(10, holds=50)
        with pytest.raises(Stuck):
            pool.join(10, holds=50)
        pool.give(50)  # the second body must give its bytes back
        assert granted(first) == [True]

    run_on_loop(use)


def test_budget_refuses_at_once_when_the_body_itself_has_all_bytes() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(100)
        with pytest.raises(Stuck):
            pool.join(1, holds=100)

    run_on_loop(use)


@pytest.mark.parametrize("is_granted", [False, True], ids=["waiting", "granted"])
def test_budget_serves_the_next_body_when_a_waiting_one_leaves(is_granted: bool) -> None:
    def use(pool: BodyPool) -> None:
        assert pool.take(60)
        first, second = pool.join(90), pool.join(40)
        if is_granted:
            pool.give(60)
        pool.leave(first)
        assert granted(second) == [True] and pool.held == (40 if is_granted else 100) and pool.num_waiting == 0

    run_on_loop(use)
