"""Tests of records in a real Redis with persistent files: quotas, versions, lifetimes and restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.gateway.store.redis_store import RedisStore
from rootstock_llm.services.gateway.store.state_redis import WRITES, StateRedis
from rootstock_llm.services.gateway.store.state_store import Changed, StoreAway, StoredRecord
from rootstock_llm.services.shared.limits import MAX_RECORD_BYTES
from tests.services.redis_server import EITHER_SERVER, RedisServer, until

T = TypeVar("T")
ALICE, BOB = owner_of("alice"), owner_of("bob")


@pytest.fixture(scope="module", params=EITHER_SERVER)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(request.param, tmp_path_factory.mktemp("state"))
    started.start()
    yield started
    started.kill()


@pytest.fixture
def empty(server: RedisServer) -> RedisServer:
    server.client.flushall()
    return server


def with_store(server: RedisServer, use: Callable[[RedisStore], Awaitable[T]], ttl_s: int = 60, **limits: int) -> T:
    async def run() -> T:
        store = RedisStore(server.url, ttl_s, limits.get("records", 100), limits.get("record_bytes", 1 << 24), patience_s=0.5)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


@pytest.mark.by_day(one_in=2, seed=2)
def test_redis_store_separates_records_by_owner(empty: RedisServer) -> None:
    async def use(store: RedisStore) -> None:
        assert await store.put(ALICE, "a", b"one") and await store.put(ALICE, "b", b"two")
        assert await store.get(ALICE, ["b", "none", "a"]) == [StoredRecord(b"two", 1), None, StoredRecord(b"one", 1)]
        assert await store.get(BOB, ["a"]) == [None] and not await store.delete(BOB, "a")
        assert await store.delete(ALICE, "a") and not await store.delete(ALICE, "a")
        assert await store.get(ALICE, ["a"]) == [None] and await store.get(ALICE, []) == []

    with_store(empty, use)


@pytest.mark.by_day(one_in=2)
def test_write_of_a_record_raises_when_the_version_has_changed(empty: RedisServer) -> None:
    async def use(store: RedisStore) -> None:
        assert await store.put(ALICE, "a", b"1", version=0)
        assert await store.put(ALICE, "a", b"2", version=1)
        for version in (0, 1, 3):
            with pytest.raises(Changed):
                await store.put(ALICE, "a", b"3", version=version)
        assert await store.get(ALICE, ["a"]) == [StoredRecord(b"2", 2)]

    with_store(empty, use)


@pytest.mark.by_day(one_in=2, seed=2)
def test_redis_store_repeats_calls_without_a_second_effect_when_replies_are_lost(
    empty: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(store: RedisStore) -> None:
        evaluate, tries = store._redis._client.eval, list[str]()

        async def lose_replies(script: str, *arguments: Any) -> Any:
            tries.append(script)
            answer = await evaluate(script, *arguments)
            if len(tries) % 2:
                raise TimeoutError("the answer is lost")
            return answer

        monkeypatch.setattr(store._redis._client, "eval", lose_replies)
        assert await store.put(ALICE, "a", b"1", version=0) and await store.put(ALICE, "a", b"2", version=1)
        assert await store.get(ALICE, ["a"]) == [StoredRecord(b"2", 2)]
        assert await store.delete(ALICE, "a") and len(tries) == 8
        assert await store.get(ALICE, ["a"]) == [None]

    with_store(empty, use)


@pytest.mark.by_day(one_in=2, seed=2)
def test_redis_store_refuses_records_above_the_quota(empty: RedisServer) -> None:
    async def use(store: RedisStore) -> None:
        assert await store.put(ALICE, "a", b"x" * 60) and await store.put(ALICE, "b", b"x" * 30)
        assert not await store.put(ALICE, "c", b"x"), "a third record exceeds the quota"
        assert not await store.put(ALICE, "b", b"x" * 41), "101 bytes exceed the quota"
        assert await store.put(ALICE, "b", b"x" * 40) and await store.put(BOB, "c", b"x" * 100)
        assert await store.delete(ALICE, "a") and await store.put(ALICE, "c", b"x" * 60)
        assert not await store.put(ALICE, "d", b"x" * (MAX_RECORD_BYTES + 1))

    with_store(empty, use, records=2, record_bytes=100)


@pytest.mark.by_day(one_in=2, seed=2)
def test_redis_store_drops_unused_records_and_frees_the_quota(empty: RedisServer) -> None:
    async def use(store: RedisStore) -> None:
        assert await store.put(ALICE, "used", b"x") and await store.put(ALICE, "unused", b"x")
        deadline = time.monotonic() + 30
        while (await store.get(ALICE, ["used"]))[0] is not None and empty.client.exists(f"state:of:{ALICE}:unused"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert [found is None for found in await store.get(ALICE, ["used", "unused"])] == [False, True]
        while not await store.put(ALICE, "other", b"x"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    with_store(empty, use, ttl_s=2, records=2)


@pytest.mark.by_day(one_in=2, seed=2)
def test_acknowledged_writes_of_records_survive_when_redis_is_killed(empty: RedisServer) -> None:
    async def fill(store: RedisStore) -> None:
        assert all([await store.put(ALICE, str(number), b"%d" % number) for number in range(50)])
        await asyncio.to_thread(empty.wait_until_written)
        empty.kill()
        with pytest.raises(StoreAway):
            await store.get(ALICE, ["1"])
        restarting = asyncio.create_task(asyncio.to_thread(empty.start))
        while not restarting.done():
            await asyncio.sleep(0.01)
        found = await store.get(ALICE, [str(number) for number in range(50)])
        assert found == [StoredRecord(b"%d" % number, 1) for number in range(50)]

    with_store(empty, fill)
    empty.kill()
    empty.start()


def refused(server: RedisServer) -> int:
    """Returns the number of calls that the server has refused as a replica."""
    return int(server.client.info("errorstats").get("errorstat_READONLY", {"count": 0})["count"])


def connections(server: RedisServer) -> set[str]:
    return {found["id"] for found in server.client.client_list()} - {str(server.client.client_id())}


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize("program", EITHER_SERVER)
def test_records_are_read_when_the_server_cannot_write_to_its_disk(program: str, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    server = RedisServer(program, folder)
    server.start()

    async def use(store: RedisStore) -> None:
        assert await store.put(ALICE, "a", b"x")
        server.lose_folder()
        with pytest.raises(StoreAway, match="MISCONF"):
            await store.put(ALICE, "a", b"y")
        assert await store.get(ALICE, ["a", "b"]) == [StoredRecord(b"x", 1), None]
        redis = StateRedis(server.url, 0.5)
        assert await redis.read("return redis.call('EXISTS', KEYS[1])", [f"state:of:{ALICE}:a"]) == 1
        await redis.close()

    try:
        with_store(server, use)
    finally:
        server.kill()


@pytest.mark.by_day(one_in=2, seed=2)
def test_redis_store_raises_when_the_server_refuses_writes(empty: RedisServer) -> None:
    """A call repeats its write over new connections while the server is a replica, and raises if its time limit passes."""

    async def use(store: RedisStore) -> None:
        empty.client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreAway):
                await store.put(ALICE, "a", b"x")
        finally:
            empty.client.config_set("maxmemory", 0)
        assert await store.put(ALICE, "a", b"x")

    async def wait(_: RedisStore) -> None:
        hasty, patient = StateRedis(empty.url, 0.3), StateRedis(empty.url, 30)
        count = WRITES + "return redis.call('INCR', KEYS[1])"
        assert await hasty.call(count, ["a"]) == 1 and await patient.call(count, ["a"]) == 2
        before, tries = connections(empty), refused(empty)
        empty.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            with pytest.raises(StoreAway, match="ReadOnlyError"):
                await hasty.call(count, ["a"])
            assert hasty.is_away and refused(empty) > tries + 1
            tries, waiting = refused(empty), asyncio.create_task(patient.call(count, ["a"]))
            await until(lambda: refused(empty) > tries)
        finally:
            empty.client.execute_command("REPLICAOF", "NO", "ONE")
        assert await waiting == 3 and await hasty.call(count, ["a"]) == 4 and not hasty.is_away
        assert len(before) == len(connections(empty)) == 2 and not before & connections(empty)
        await hasty.close()
        await patient.close()

    with_store(empty, use)
    with_store(empty, wait)
