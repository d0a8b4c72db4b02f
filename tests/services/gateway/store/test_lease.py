"""Tests of leases in a real Redis: one gateway at a time has a lease, and only this gateway can write with it."""

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
    """Runs a test with the Leases of two gateways on one Redis."""

    async def run() -> None:
        server.client.flushall()
        both = [StateRedis(server.url, 0.5) for _ in range(2)]
        try:
            await use(Leases(both[0], 60), Leases(both[1], 60))
        finally:
            for each in both:
                await each.close()

    asyncio.run(run())


def expire(server: RedisServer, lease: Lease) -> None:
    """Deletes the key of a lease, as Redis does when the lease expires."""
    server.client.delete(lease.key)


def test_unexpired_lease_can_be_taken_by_another_gateway_only_after_release(server: RedisServer) -> None:
    async def use(first: Leases, second: Leases) -> None:
        lease = await first.take("work")
        assert lease is not None and await second.take("work") is None and await second.take("other") is not None
        assert await first.renew(lease) and await first.write(lease, WRITE, ["written"], "a") == 1
        assert 0 < server.client.pttl(lease.key) <= 60_000
        await first.release(lease)
        assert await second.take("work") is not None

    with_leases(server, use)


def test_write_to_the_store_raises_when_the_lease_is_lost(server: RedisServer) -> None:
    async def use(first: Leases, second: Leases) -> None:
        lease = await first.take("work")
        assert lease is not None
        expire(server, lease)
        with pytest.raises(LeaseLost):
            await first.write(lease, WRITE, ["written"], "late")
        other = await second.take("work")
        assert other is not None and not await first.renew(lease)
        with pytest.raises(LeaseLost):
            await first.write(lease, WRITE, ["written"], "late")
        await first.release(lease)
        assert await second.write(other, WRITE, ["written"], "second") == 1
        assert server.client.get("written") == b"second"

    with_leases(server, use)


def test_renewal_restores_an_expired_lease_unless_another_gateway_took_the_lease(server: RedisServer) -> None:
    """A lease expires if the gateway cannot reach the store for longer than the lease lasts."""

    async def use(first: Leases, second: Leases) -> None:
        lease = await first.take("work")
        assert lease is not None
        expire(server, lease)
        assert await first.renew(lease) and await second.take("work") is None

    with_leases(server, use)
