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
    return [reservation.granted.done() for reservation in reservations]


def test_pool_grants_bytes_in_order_even_when_a_later_body_would_fit() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.try_reserve(60)
        large, small = pool.enqueue(90), pool.enqueue(10)
        assert not pool.try_reserve(10) and granted(large, small) == [False, False]
        pool.release(60)
        assert granted(large, small) == [True, True] and pool.reserved == 100

    run_on_loop(use)


def test_pool_grants_bytes_first_to_bodies_that_own_bytes() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.try_reserve(50) and pool.try_reserve(50)
        new, growing = pool.enqueue(20), pool.enqueue(40, owned=50)
        pool.release(50)
        assert granted(new, growing) == [False, True]
        pool.release(90)
        assert granted(new) == [True] and pool.reserved == 20

    run_on_loop(use)


def test_pool_refuses_a_body_when_all_other_bytes_belong_to_waiting_bodies() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.try_reserve(50) and pool.try_reserve(50)
        first = pool.enqueue(10, owned=50)
        with pytest.raises(Stuck):
            pool.enqueue(10, owned=50)
        pool.release(50)  # the second body must give its bytes back
        assert granted(first) == [True]

    run_on_loop(use)


def test_pool_refuses_a_body_at_once_when_the_body_itself_owns_all_bytes() -> None:
    def use(pool: BodyPool) -> None:
        assert pool.try_reserve(100)
        with pytest.raises(Stuck):
            pool.enqueue(1, owned=100)

    run_on_loop(use)


@pytest.mark.parametrize("is_granted", [False, True], ids=["waiting", "granted"])
def test_pool_grants_bytes_to_the_next_body_when_the_first_one_is_cancelled(is_granted: bool) -> None:
    def use(pool: BodyPool) -> None:
        assert pool.try_reserve(60)
        first, second = pool.enqueue(90), pool.enqueue(40)
        if is_granted:
            pool.release(60)
        pool.cancel(first)
        assert granted(second) == [True] and pool.reserved == (40 if is_granted else 100) and pool.num_waiting == 0

    run_on_loop(use)
