"""Tests of background responses in a real Redis: leases, repeated writes, quotas and restarts."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.store import background_past, background_store
from rootstock_llm.services.gateway.store.background_past import pages
from rootstock_llm.services.gateway.store.background_record import (
    BackgroundOrder,
    BackgroundStatus,
    FinalRecords,
    Piece,
    StoredConversationUpdate,
)
from rootstock_llm.services.gateway.store.background_store import (
    GIVEN_UP,
    BackgroundLimits,
    BackgroundStore,
    Begun,
    WriteResult,
    new_lease,
)
from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.gateway.store.redis_store import RedisStore
from rootstock_llm.services.gateway.store.state_redis import StateRedis
from rootstock_llm.services.gateway.store.state_store import StoreAway
from tests.services.redis_server import EITHER_SERVER, RedisServer

ALICE = owner_of("alice")
NOW = 1_900_000_000
RECORD = b'{"response":"queued"}'


@pytest.fixture(scope="module", params=EITHER_SERVER)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(request.param, tmp_path_factory.mktemp("state"))
    started.start()
    yield started
    started.kill()


def order(name: str = "resp_a") -> BackgroundOrder:
    about = ("", ["hermes", "think"], [7, 8], 4096, {"top_k": 5})
    return BackgroundOrder(name, ALICE, "alice", "request", "", NOW, NOW + 60, "demo", {"seed": 7}, "", 0, *about)


ORDER = order()


def with_stores(
    server: RedisServer, use: Callable[[BackgroundStore, RedisStore], Awaitable[None]], size: int = 1 << 20, most_open: int = 2
) -> None:
    async def run() -> None:
        server.client.flushall()
        redis, records = StateRedis(server.url, 5), RedisStore(server.url, 600, 100, size, 5)
        try:
            await use(BackgroundStore(redis, 60, BackgroundLimits(600, 60, 100, size, most_open)), records)
        finally:
            await redis.close()
            await records.close()

    asyncio.run(run())


def events(first: int, count: int) -> list[bytes]:
    return [json.dumps({"type": "response.x", "sequence_number": number}).encode() for number in range(first, first + count)]


def piece(number: int, ids: range, **fields: Any) -> Piece:
    """Returns a piece with one event, for a response that began with two events."""
    content = array("I", ids).tobytes()
    return Piece(
        number,
        BackgroundStatus.IN_PROGRESS,
        events(number + 1, 1),
        ids.start,
        content,
        f"text {number}",
        decoded=ids.stop,
        **fields,
    )


async def begin(store: BackgroundStore, ordered: BackgroundOrder = ORDER) -> Lease:
    lease = new_lease(ALICE, ordered.id)
    assert await store.begin(lease, ordered, RECORD, b"prompt", events(0, 2)) is Begun.YES
    return lease


async def read_pages(page: Callable[[int], Awaitable[Sequence[Any]]]) -> list[Any]:
    return [item async for items in pages(page) for item in items]


def expire(server: RedisServer, lease: Lease) -> None:
    """Deletes the key of a lease, as Redis does when the lease expires."""
    server.client.delete(lease.key)


def used_bytes(server: RedisServer) -> int:
    return int(server.client.hget(f"state:size:{ALICE}", "!") or 0)


@pytest.mark.by_day(one_in=2, seed=2)
def test_background_store_has_each_write_once_when_calls_are_repeated(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(store: BackgroundStore, records: RedisStore) -> None:
        lease = await begin(store)
        assert await store.begin(lease, ORDER, RECORD, b"prompt", events(0, 2)) is Begun.YES
        weights = ("model", "revision", "tokenizer")
        for each in (
            piece(1, range(3)),
            piece(1, range(3)),
            piece(2, range(3, 5), chars=9, shown=4, weights=weights, numerics="n"),
        ):
            assert await store.write(lease, ORDER, each) is WriteResult.YES
        found = await store.read(ALICE, ORDER.id)
        assert found is not None and (found.order, found.status, found.pieces) == (ORDER, BackgroundStatus.IN_PROGRESS, 2)
        assert (found.prompt, found.decoded, found.chars, found.shown) == (b"prompt", 5, 9, 4)
        assert (found.weights, found.numerics) == (weights, "n")
        assert await read_pages(found.past.events) == events(0, 4) and await read_pages(found.past.texts) == ["text 1", "text 2"]
        assert await read_pages(found.past.ids) == [0, 1, 2, 3, 4]
        monkeypatch.setattr(background_store, "PAGE_BYTES", len(events(0, 3)[0]) * 2)
        page = await store.follow(ALICE, ORDER.id, 0)
        assert page is not None and (page.total, page.events) == (4, events(0, 2))
        page = await store.follow(ALICE, ORDER.id, 3)
        assert page is not None and (page.total, page.events, page.is_over) == (4, events(3, 1), False)
        for _ in range(2):
            await store.finish(lease, ORDER, 3, BackgroundStatus.COMPLETED, FinalRecords(b"whole"), events(4, 1))
        page = await store.follow(ALICE, ORDER.id, 4)
        assert page is not None and page.is_over and page.events == events(4, 1) and page.total == 5
        (record,) = await records.get(ALICE, [ORDER.id])
        assert record is not None and (record.content, record.version) == (b"whole", 2)
        assert await store.read(ALICE, ORDER.id) is None and await store.find_unleased(9) == []

    with_stores(server, use)


@pytest.mark.by_day(one_in=2)
def test_size_of_the_pages_read_from_a_stored_response_is_limited(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is larger than the limit only if it has a single item.

    After the end of a response, reading its ids, texts or logprobs raises LeaseLost.
    """
    monkeypatch.setattr(background_past, "PAGE_BYTES", 4000)

    async def use(store: BackgroundStore, _records: RedisStore) -> None:
        lease, sizes = await begin(store), list[int]()
        rows = [worker_pb2.LogprobRows(values=[number] * 2) for number in range(300)]
        for number in range(300):
            text = "x" * (9000 if number == 150 else 300)
            ids = range(2 * number, 2 * number + 2)
            new = Piece(number + 1, BackgroundStatus.IN_PROGRESS, [text.encode()], ids.start, array("I", ids).tobytes(), text)
            assert await store.write(lease, ORDER, replace(new, logprobs=rows[number].SerializeToString())) is WriteResult.YES
        found, called = await store.read(ALICE, ORDER.id), StateRedis.call

        async def measured(redis: StateRedis, *of: Any) -> Any:
            page = await called(redis, *of)
            sizes.append(sum(map(len, page)) if isinstance(page, list) else len(page))
            return page

        assert found is not None
        past = found.past
        with monkeypatch.context() as patch:
            patch.setattr(StateRedis, "call", measured)
            assert await read_pages(past.ids) == list(range(600)) and await read_pages(past.logprobs) == rows
            for page in (past.events, past.texts):
                assert [len(each) for each in await read_pages(page)][-300:] == [300] * 150 + [9000] + [300] * 149
        assert max(sizes) == 9000 and sorted(sizes)[-3] <= 4000 and len(sizes) > 50
        await store.finish(lease, ORDER, 301, BackgroundStatus.CANCELLED, FinalRecords(b"cancelled"), [])
        for gone in (past.ids, past.texts, past.logprobs):
            with pytest.raises(LeaseLost):
                await gone(128)

    with_stores(server, use)


@pytest.mark.by_day(one_in=2, seed=2)
def test_background_store_refuses_writes_without_the_lease(server: RedisServer) -> None:
    """A write also fails after the response has ended, or if its piece does not follow the last stored piece."""

    async def use(store: BackgroundStore, _records: RedisStore) -> None:
        lease = await begin(store)
        with pytest.raises(LeaseLost):
            await store.write(lease, ORDER, piece(2, range(1)))
        expire(server, lease)
        other = await store.take(ALICE, ORDER.id)
        assert other is not None and await store.take(ALICE, ORDER.id) is None
        before = await store.read(ALICE, ORDER.id)
        for call in (
            store.write(lease, ORDER, piece(1, range(1))),
            store.finish(lease, ORDER, 1, BackgroundStatus.FAILED, FinalRecords(b""), []),
        ):
            with pytest.raises(LeaseLost):
                await call
        assert await store.renew({lease: ORDER, other: ORDER}) == [lease]
        await store.release(lease, ALICE, ORDER.id)
        again = await store.read(ALICE, ORDER.id)
        assert before is not None and again is not None and again.past.lengths == before.past.lengths
        assert (
            replace(again, past=before.past) == before and await store.write(other, ORDER, piece(1, range(1))) is WriteResult.YES
        )
        await store.finish(other, ORDER, 2, BackgroundStatus.COMPLETED, FinalRecords(b"whole"), events(3, 1))
        for number in (1, 2, 3):
            with pytest.raises(LeaseLost):
                await store.write(other, ORDER, piece(number, range(1)))
        assert await store.renew({other: ORDER}) == [other] and await store.take(ALICE, ORDER.id) is None

    with_stores(server, use)


@pytest.mark.by_day(one_in=2)
def test_number_of_takeovers_counts_gateways_that_lost_the_response_without_release(server: RedisServer) -> None:
    """release() subtracts 1 from the number, and a gateway that runs the response for SURVIVED_S resets the number."""

    async def use(store: BackgroundStore, _records: RedisStore) -> None:
        takes, lease = [], await begin(store)
        for leaves, ran_s in ((False, 0), (True, 0), (False, 0), (False, 100), (False, 0)):
            if leaves:
                for _ in range(2):
                    await store.release(lease, ALICE, ORDER.id)
                assert await store.renew({lease: ORDER}) == [lease]
            expire(server, lease)
            assert bool(await store.find_unleased(9, released_only=True)) == leaves
            server.client.hincrby(f"state:background:{ALICE}:{ORDER.id}", "taken", -ran_s)
            again = await store.take(ALICE, ORDER.id)
            found = await store.read(ALICE, ORDER.id)
            assert again is not None and found is not None
            lease = again
            takes.append(found.takes)
        assert takes == [2, 2, 3, 1, 2]

    with_stores(server, use)


@pytest.mark.by_day(one_in=2)
def test_cancellation_takes_the_lease_from_the_gateway_with_the_lease(server: RedisServer) -> None:
    async def use(store: BackgroundStore, _records: RedisStore) -> None:
        lease = await begin(store)
        seized = await store.seize(ALICE, ORDER.id)
        assert seized is not None and await store.renew({lease: ORDER}) == [lease]
        with pytest.raises(LeaseLost):
            await store.write(lease, ORDER, piece(1, range(1)))
        expire(server, seized)
        next_lease = await store.take(ALICE, ORDER.id)
        found = await store.read(ALICE, ORDER.id)
        assert next_lease is not None and found is not None and found.cancelled, "the next gateway finds the response cancelled"
        await store.finish(next_lease, ORDER, 1, BackgroundStatus.CANCELLED, FinalRecords(b"cancelled"), [])
        assert await store.seize(ALICE, ORDER.id) is None and await store.status(ALICE, ORDER.id) is BackgroundStatus.CANCELLED
        assert await store.seize(ALICE, "resp_none") is None

    with_stores(server, use)


@pytest.mark.by_day(one_in=2, seed=2)
def test_unreadable_response_is_ended_after_several_takeovers(server: RedisServer) -> None:
    """take() also ends a response that has no record. Reading a record does not shorten the lifetime of the record."""

    async def use(store: BackgroundStore, records: RedisStore) -> None:
        lease, other = await begin(store), await begin(store, order("resp_b"))
        await records.get(ALICE, ["resp_b"])
        assert all(server.client.ttl(f"state:{kind}:{ALICE}:resp_b") > 650 for kind in ("of", "background"))
        server.client.delete(f"state:of:{ALICE}:resp_b")
        expire(server, other)
        assert await store.take(ALICE, "resp_b") is None
        server.client.hset(f"state:background:{ALICE}:{ORDER.id}", "order", "{")
        for _ in range(GIVEN_UP - 1):
            expire(server, lease)
            again = await store.take(ALICE, ORDER.id)
            assert again is not None
            lease = again
            with pytest.raises(ValueError, match=r"unexpected|object"):
                await store.order(lease, ALICE, ORDER.id)
        expire(server, lease)
        last = await store.take(ALICE, ORDER.id)
        assert last is not None and await store.order(last, ALICE, ORDER.id) is None
        with pytest.raises(LeaseLost):
            await store.give_up(lease, ALICE, ORDER.id, b"late")
        await store.give_up(last, ALICE, ORDER.id, b"failed")
        assert not list(server.client.scan_iter("state:background:*")) and await store.find_unleased(9) == []
        assert not server.client.exists(last.key) and int(server.client.hget(f"state:size:{ALICE}", ORDER.id) or 0) == 6
        (found,) = await records.get(ALICE, [ORDER.id])
        assert found is not None and found.content == b"failed"
        with pytest.raises(LeaseLost):
            await store.give_up(last, ALICE, ORDER.id, b"twice")

    with_stores(server, use)


@pytest.mark.by_day(one_in=2, seed=2)
def test_end_of_a_response_is_stored_even_when_memory_is_full(server: RedisServer) -> None:
    async def use(store: BackgroundStore, _records: RedisStore) -> None:
        lease = await begin(store)
        server.client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreAway, match="OutOfMemory"):
                await store.write(lease, ORDER, piece(1, range(1)))
            await store.finish(lease, ORDER, 1, BackgroundStatus.FAILED, FinalRecords(b"whole"), events(2, 1))
        finally:
            server.client.config_set("maxmemory", 0)
        assert await store.status(ALICE, ORDER.id) is BackgroundStatus.FAILED

    with_stores(server, use)


@pytest.mark.by_day(one_in=2)
def test_end_of_a_response_and_the_conversation_items_are_stored_in_one_write(server: RedisServer) -> None:
    """The conversation is not extended if the lease is lost, the conversation's version has changed or the quota is full."""

    async def use(store: BackgroundStore, records: RedisStore) -> None:
        async def conversation() -> tuple[bytes, int] | None:
            (found,) = await records.get(ALICE, ["conv_a"])
            return None if found is None else (found.content, found.version)

        async def finish(lease: Lease, version: int, content: bytes, ordered: BackgroundOrder = ORDER) -> bool:
            return await store.finish(
                lease,
                ordered,
                1,
                BackgroundStatus.COMPLETED,
                FinalRecords(b"whole", StoredConversationUpdate("conv_a", version, content)),
                [],
            )

        assert await records.put(ALICE, "conv_a", b"one", 0)
        lost, other = await begin(store), await begin(store, order("resp_b"))
        expire(server, lost)
        lease = await store.take(ALICE, ORDER.id)
        assert lease is not None
        with pytest.raises(LeaseLost):
            await finish(lost, 1, b"one, lost")
        assert not await finish(lease, 2, b"one, two") and await conversation() == (b"one", 1)
        for _ in range(2):
            assert await finish(lease, 1, b"one, two")
        assert await conversation() == (b"one, two", 2) and await store.status(ALICE, ORDER.id) is BackgroundStatus.COMPLETED
        assert await finish(other, 2, b"x" * 4000, order("resp_b")) and await conversation() == (b"one, two", 2)
        sizes = server.client.hgetall(f"state:size:{ALICE}")
        assert int(sizes.pop(b"!")) == sum(map(int, sizes.values())) and sizes[b"conv_a"] == b"8"

    with_stores(server, use, size=4000)


@pytest.mark.by_day(one_in=2, seed=2)
def test_background_store_counts_bytes_against_the_quota_and_frees_the_bytes_on_deletion(server: RedisServer) -> None:
    async def use(store: BackgroundStore, records: RedisStore) -> None:
        lease, other = await begin(store), await begin(store, order("resp_b"))
        assert await store.begin(new_lease(ALICE, "c"), order("resp_c"), RECORD, b"", []) is Begun.TOO_MANY
        before = used_bytes(server)
        assert await store.write(lease, ORDER, piece(1, range(5))) is WriteResult.YES
        assert used_bytes(server) == before + 20 + len("text 1") + len(events(2, 1)[0])
        assert await store.write(lease, ORDER, Piece(2, BackgroundStatus.IN_PROGRESS, [b"x" * 4000])) is WriteResult.STORE_FULL
        await store.finish(lease, ORDER, 2, BackgroundStatus.COMPLETED, FinalRecords(b"x" * 5000), [])
        num_bytes = sum(map(len, events(0, 3)))
        assert server.client.hmget(f"state:size:{ALICE}", ORDER.id, f"work:{ORDER.id}") == [b"5000", b"%d" % num_bytes]
        assert await store.begin(new_lease(ALICE, "c"), order("resp_c"), RECORD, b"", []) is Begun.STORE_FULL
        for name in (ORDER.id, "resp_b"):
            assert await store.delete(ALICE, name)
        assert not await store.delete(ALICE, ORDER.id) and used_bytes(server) == 0
        with pytest.raises(LeaseLost):
            await store.write(other, order("resp_b"), piece(1, range(1)))
        assert await records.get(ALICE, [ORDER.id, "resp_b"]) == [None, None]
        assert not list(server.client.scan_iter("*resp*"))

    with_stores(server, use, size=4000)


@pytest.mark.by_day(one_in=2)
def test_acknowledged_writes_of_background_responses_survive_when_redis_is_killed(server: RedisServer) -> None:
    async def use(store: BackgroundStore, _records: RedisStore) -> None:
        lease = await begin(store)
        for number in range(1, 20):
            assert await store.write(lease, ORDER, piece(number, range(number - 1, number))) is WriteResult.YES
        await asyncio.to_thread(server.wait_until_written)
        server.kill()
        await asyncio.to_thread(server.start)
        found = await store.read(ALICE, ORDER.id)
        assert found is not None
        assert await read_pages(found.past.ids) == list(range(19)) and await read_pages(found.past.events) == events(0, 21)
        assert await store.renew({lease: ORDER}) == [] and await store.find_unleased(9) == []
        expire(server, lease)
        assert await store.find_unleased(9) == [(ALICE, ORDER.id)]

    with_stores(server, use)
