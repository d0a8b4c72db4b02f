"""Leases in a real server: one holder at a time, and nobody writes after it was one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from services.gateway.state.lease import Lease, LeaseLost, Leases
from services.gateway.state.state_redis import StateRedis
from tests.services.redis_server import RedisServer, redis_server

WRITE = "redis.call('SET', KEYS[2], ARGV[2]) return 1"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


def with_leases(server: RedisServer, use: Callable[[Leases, Leases], Awaitable[None]]) -> None:
    """Of two gateways."""

    async def run() -> None:
        server.client.flushall()
        both = [StateRedis(server.url, 0.5) for _ in range(2)]
        try:
            await use(Leases(both[0], 60), Leases(both[1], 60))
        finally:
            for each in both:
                await each.close()

    asyncio.run(run())


def run_out(server: RedisServer, lease: Lease) -> None:
    """As if its time were over."""
    server.client.delete(lease.key)


def test_one_has_it_until_it_gives_it_back(server: RedisServer) -> None:
    async def use(ours: Leases, theirs: Leases) -> None:
        lease = await ours.take("work")
        assert lease is not None and await theirs.take("work") is None and await theirs.take("other") is not None
        assert await ours.keep(lease) and await ours.write(lease, WRITE, ["written"], "a") == 1
        assert 0 < server.client.pttl(lease.key) <= 60_000
        await ours.give_back(lease)
        assert await theirs.take("work") is not None

    with_leases(server, use)


def test_what_a_late_holder_writes_is_not_written(server: RedisServer) -> None:
    async def use(ours: Leases, theirs: Leases) -> None:
        lease = await ours.take("work")
        assert lease is not None
        run_out(server, lease)
        with pytest.raises(LeaseLost):
            await ours.write(lease, WRITE, ["written"], "late")
        other = await theirs.take("work")
        assert other is not None and not await ours.keep(lease)
        with pytest.raises(LeaseLost):
            await ours.write(lease, WRITE, ["written"], "late")
        await ours.give_back(lease)
        assert await theirs.write(other, WRITE, ["written"], "theirs") == 1
        assert server.client.get("written") == b"theirs"

    with_leases(server, use)


def test_what_has_run_out_is_kept_where_nobody_has_taken_it(server: RedisServer) -> None:
    """As of a store that was away for longer than leases last."""

    async def use(ours: Leases, theirs: Leases) -> None:
        lease = await ours.take("work")
        assert lease is not None
        run_out(server, lease)
        assert await ours.keep(lease) and await theirs.take("work") is None

    with_leases(server, use)
