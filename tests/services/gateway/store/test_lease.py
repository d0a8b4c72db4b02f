"""Leases in a real Redis: one holder at a time, which writes only while it has the lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost, Leases
from rootstock_llm.services.gateway.store.state_redis import StateRedis
from tests.services.redis_server import RedisServer, redis_server

WRITE = "redis.call('SET', KEYS[2], ARGV[2]) return 1"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


def with_leases(server: RedisServer, use: Callable[[Leases, Leases], Awaitable[None]]) -> None:
    """Runs a test with the leases of two gateways."""

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
    """Makes a lease expire."""
    server.client.delete(lease.key)


def test_lease_has_one_holder_until_give_back(server: RedisServer) -> None:
    async def use(ours: Leases, theirs: Leases) -> None:
        lease = await ours.take("work")
        assert lease is not None and await theirs.take("work") is None and await theirs.take("other") is not None
        assert await ours.keep(lease) and await ours.write(lease, WRITE, ["written"], "a") == 1
        assert 0 < server.client.pttl(lease.key) <= 60_000
        await ours.give_back(lease)
        assert await theirs.take("work") is not None

    with_leases(server, use)


def test_write_raises_when_the_lease_is_lost(server: RedisServer) -> None:
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


def test_keep_renews_an_expired_lease_without_a_new_holder(server: RedisServer) -> None:
    """This happens if the store was unreachable for longer than a lease lasts."""

    async def use(ours: Leases, theirs: Leases) -> None:
        lease = await ours.take("work")
        assert lease is not None
        run_out(server, lease)
        assert await ours.keep(lease) and await theirs.take("work") is None

    with_leases(server, use)
