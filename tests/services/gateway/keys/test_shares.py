"""Tests of API key limits that several gateways share in a real Redis, which is killed and restarted.

Within a minute, the gateways never admit more than the limit, and not much less. The clock is virtual.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.keys.key_ring import Admission, KeyLimits
from rootstock_llm.services.gateway.keys.key_table import ApiKey, KeyTable
from tests.night import NIGHTLY
from tests.services.redis_server import RedisServer

BEGIN = 1_700_000_000.0
TURN_S = 0.2 if NIGHTLY else 0.4  # virtual seconds between two exchanges of shares
KEY = "team"


class Gateways:
    """The KeyLimits of several gateways, with one virtual clock. Admitted requests are recorded with their times."""

    def __init__(self, url: str, count: int = 3, **limits: Any) -> None:
        self.now = BEGIN
        self.admitted: list[tuple[float, int]] = []  # time and amount of each admitted request
        self.refused: list[str] = []
        self._url = url
        self._table = KeyTable([ApiKey(KEY, (), **limits)])
        self.each = [self._make(f"g{number}") for number in range(count)]

    def _make(self, name: str) -> KeyLimits:
        return KeyLimits(self._table, self._url, name, lambda: 3, self.refused.append, lambda: self.now)

    def add(self, name: str) -> None:
        self.each.append(self._make(name))

    def ask(self, gateway: int, tokens: int = 0) -> Admission | None:
        """Begins a request. Returns None if it is refused."""
        try:
            admission = self.each[gateway].begin(KEY)
            assert admission is not None
            if tokens:
                admission.reserve(tokens)
        except ApiError as error:
            assert error.status == 429 and error.code == "rate_limit_exceeded"
            return None
        self.admitted.append((self.now, tokens or 1))
        return admission

    async def turn(self, *gateways: int) -> None:
        """Exchanges shares with Redis once for each of these gateways; without arguments, for all gateways."""
        for gateway in gateways or range(len(self.each)):
            refill = self.each[gateway].refill
            assert refill is not None
            await refill.turn()

    async def advance(self, seconds: float) -> None:
        """Advances the clock without requests."""
        until = self.now + seconds
        while self.now < until:
            self.now += TURN_S
            await self.turn()

    def up(self) -> list[bool]:
        return [limits.shares_are_up() for limits in self.each]

    def max_in_a_minute(self) -> int:
        most = total = first = 0
        for at, amount in self.admitted:
            total += amount
            while self.admitted[first][0] <= at - 60:
                total -= self.admitted[first][1]
                first += 1
            most = max(most, total)
        return most

    def within(self, begin: float, end: float) -> int:
        return sum(amount for at, amount in self.admitted if begin <= at < end)

    async def close(self) -> None:
        for limits in self.each:
            assert limits.refill is not None
            await limits.refill._store.close()


async def hammer(
    gateways: Gateways,
    seconds: float,
    rng: random.Random,
    weights: list[float],
    tokens: int = 0,
    per_turn: int = 4,
    hold: bool = True,
) -> None:
    """Sends far more requests than the limit admits.

    Args:
        weights: the relative number of requests of each gateway.
        tokens: mean size of a request in tokens; 0 if requests do not charge tokens.
        per_turn: number of requests before each turn of the gateways.
        hold: whether admitted requests stay open.
    """
    until = gateways.now + seconds
    while gateways.now < until:
        for _ in range(per_turn):
            (gateway,) = rng.choices(range(len(weights)), weights)
            size = rng.randint(1, 2 * tokens) if tokens else 0
            admission = gateways.ask(gateway, size)
            if admission is not None and tokens and rng.random() < 0.3:
                used = rng.randint(0, size)
                admission.end(used)
                gateways.admitted[-1] = (gateways.now, used)
            elif admission is not None and not hold:
                admission.end(0)
        gateways.now += TURN_S * rng.random() * 2
        await gateways.turn(*rng.sample(range(len(weights)), len(weights)))


@pytest.mark.parametrize("tokens", [0, 300] if NIGHTLY else [0])
@pytest.mark.parametrize("away", [(20,), (0, 150)] if NIGHTLY else [(20,)])
def test_gateways_stay_within_the_limit_when_redis_is_killed_and_restarted(
    server: RedisServer, tokens: int, away: tuple[int, ...]
) -> None:
    """Once Redis is lost, most requests go to other gateways. These cannot read the use of the first gateway."""
    limit = 60_000 if tokens else 300
    limits = {"tokens_per_minute": limit} if tokens else {"requests_per_minute": limit}
    usual, meanwhile = [20.0, 1.0, 0.0], [1.0, 20.0, 20.0]

    async def run() -> None:
        rng = random.Random(tokens)
        gateways = Gateways(server.url, **limits)
        await gateways.advance(6)
        assert all(gateways.up())
        begun = gateways.now
        await hammer(gateways, 40, rng, usual, tokens)
        assert gateways.within(begun, begun + 40) >= 0.85 * limit
        for away_s in away:
            server.kill()
            await hammer(gateways, away_s, rng, meanwhile, tokens)
            server.start()
            back = gateways.now
            await hammer(gateways, 75, rng, meanwhile, tokens)
            assert all(gateways.up())
            assert gateways.within(back + 15, back + 75) >= 0.5 * limit
        assert gateways.max_in_a_minute() <= limit
        await gateways.close()

    asyncio.run(run())


def test_requests_stay_within_the_limit_when_redis_is_emptied_and_only_one_gateway_reports(server: RedisServer) -> None:
    async def run() -> None:
        gateways = Gateways(server.url, requests_per_minute=300)
        await gateways.advance(8)
        await hammer(gateways, 8, random.Random(0), [1, 0, 0], per_turn=60)
        assert len(gateways.admitted) >= 295
        server.kill()
        await gateways.turn()
        server.start()
        for _ in range(5):
            for _ in range(100):
                gateways.ask(1)
            gateways.now += TURN_S
            await gateways.turn(1)
        assert len(gateways.admitted) <= 300
        await gateways.close()

    asyncio.run(run())


def test_one_gateway_can_use_nearly_the_whole_limit_for_a_burst(server: RedisServer) -> None:
    async def run() -> None:
        gateways = Gateways(server.url, requests_per_minute=300)
        await gateways.advance(8)
        assert all(gateways.ask(gateway) for gateway in range(3)), "each gateway admits its first request at once"
        at_once = sum(gateways.ask(0) is not None for _ in range(300))
        assert at_once >= 45, "a share is granted before the first request"
        await hammer(gateways, 8, random.Random(0), [1, 0, 0], per_turn=40)
        assert 295 <= len(gateways.admitted) <= 300
        assert set(gateways.refused) == {"requests"}
        await gateways.close()

    asyncio.run(run())


def test_shares_of_a_limit_move_to_a_new_gateway_and_away_from_a_dead_gateway(server: RedisServer) -> None:
    async def run() -> None:
        rng = random.Random(1)
        gateways = Gateways(server.url, count=2, requests_per_minute=120, max_concurrent=9)
        await gateways.advance(6)
        await hammer(gateways, 10, rng, [1, 1], hold=False)
        gateways.add("g2")
        await gateways.turn(2)
        await hammer(gateways, 66, rng, [1, 1, 1], hold=False)
        assert gateways.max_in_a_minute() <= 120
        await gateways.advance(70)  # at the beginning of the next minute, every gateway has an equal share
        held = [gateways.ask(0) for _ in range(9)]
        assert any(held)
        lost = gateways.each.pop(0)
        await gateways.advance(90)
        mine: list[Admission] = []
        for _ in range(20):
            mine += [got for gateway in range(2) if (got := gateways.ask(gateway)) is not None]
            gateways.now += TURN_S
            await gateways.turn()
        assert len(mine) == 9, "the share of the dead gateway is free again"
        assert lost.refill is not None
        await lost.refill._store.close()
        await gateways.close()

    asyncio.run(run())


def test_share_of_a_new_gateway_is_granted_before_the_first_request(server: RedisServer) -> None:
    async def run() -> None:
        gateways = Gateways(server.url, count=1, requests_per_minute=30, max_concurrent=8)
        await gateways.advance(40)
        for name in ("g1", "g2"):
            gateways.add(name)
            await gateways.advance(3)
        assert all(gateways.ask(gateway) for gateway in range(3)) and not gateways.refused
        assert sum(gateways.ask(gateway) is not None for gateway in range(3) for _ in range(30)) <= 27
        await gateways.close()

    asyncio.run(run())


def test_gateways_share_the_limit_of_concurrent_requests(server: RedisServer) -> None:
    async def run() -> None:
        rng = random.Random(2)
        gateways = Gateways(server.url, max_concurrent=12)
        await gateways.advance(6)
        running: list[Admission] = []
        most = 0
        for _ in range(150):
            admission = gateways.ask(rng.choices(range(3), [5, 1, 1])[0])
            if admission is not None:
                running.append(admission)
            elif rng.random() < 0.3:
                running.pop(rng.randrange(len(running))).end(0)
            most = max(most, len(running))
            gateways.now += TURN_S
            await gateways.turn()
        assert most == 12 and set(gateways.refused) == {"concurrency"}
        await gateways.close()

    asyncio.run(run())


def test_unused_tokens_of_a_finished_request_are_refunded(server: RedisServer) -> None:
    async def run() -> None:
        gateways = Gateways(server.url, count=2, tokens_per_minute=1000)
        await gateways.advance(6)
        for _ in range(20):
            for _ in range(8):  # the other gateway may hold a share, which must move to this gateway first
                admission = gateways.ask(0, 600)
                if admission is not None:
                    break
                gateways.now += TURN_S
                await gateways.turn()
            assert admission is not None
            admission.end(10)
        assert gateways.ask(1, 900) is None
        await gateways.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["full", "killed", "never reachable"])
def test_gateways_divide_the_limit_without_redis(server: RedisServer, fault: str) -> None:
    async def run() -> None:
        if fault == "never reachable":
            server.kill()
        gateways = Gateways(server.url, requests_per_minute=90)
        await gateways.advance(6)
        if fault == "full":
            server.client.config_set("maxmemory", 1)
        elif fault == "killed":
            server.kill()
        await gateways.advance(80)
        assert not any(gateways.up())
        for _ in range(100):
            for gateway in range(3):
                gateways.ask(gateway)
        assert len(gateways.admitted) == 90
        await gateways.close()

    try:
        asyncio.run(run())
    finally:
        if fault == "full":
            server.client.config_set("maxmemory", 0)
        else:
            server.start()


def test_redis_keys_of_the_share_store_are_small_and_expire(server: RedisServer) -> None:
    async def run() -> None:
        gateways = Gateways(server.url, requests_per_minute=600, tokens_per_minute=10**6, max_concurrent=100)
        await gateways.advance(3)
        await hammer(gateways, 6, random.Random(3), [1, 1, 1], 300)
        await gateways.close()

    asyncio.run(run())
    keys = {key.decode() for key in server.client.keys("*")}
    (of_key,) = keys - {"rl:gateways", "rl:need"}
    assert len(of_key) == len("rl:key:") + 32 and KEY not in of_key
    assert all(0 < server.client.ttl(key) <= 75 for key in keys)
    assert sum(map(len, server.client.hvals(of_key))) < 3 * 300
