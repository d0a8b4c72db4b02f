"""Tests of the gateway's copy of the prefix index, with healthy and faulty Redis servers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rootstock_llm.services.gateway.index import mirror
from rootstock_llm.services.gateway.index.mirror import IndexMirror, LeaseTable
from rootstock_llm.services.gateway.routing.prefix_index import Applied, MirroredOwners, PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import LEASE_TTL_S, BlockTier, IndexEvent, events_key, lease_key, own_key
from rootstock_llm.services.shared.index.redis_client import redis_client
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents
from rootstock_llm.services.worker.index import publisher as publishing
from rootstock_llm.services.worker.index.publisher import IndexPublisher
from rootstock_llm.services.worker.index.records import BlockMove, WorkerRecords
from tests.services.redis_server import EITHER_SERVER, RedisServer, redis_server, until

MODEL, WORKER = "m", "worker-1"


def block(number: int) -> bytes:
    return number.to_bytes(8, "big")


def blocks(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(block, numbers))


def stored(*numbers: int) -> CacheEvents:
    return CacheEvents(False, blocks(*numbers), ())


@pytest.fixture(params=EITHER_SERVER)
def own_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Yields a server that the test may break."""
    with redis_server(request.param) as server:
        yield server


class MirroredIndex:
    def __init__(self, server: RedisServer, *models: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.changes = 0
        self.index = PrefixIndex()
        self.mirror = IndexMirror(server.url, self.index, self._changed, clock)
        for model in models or (MODEL,):
            self.mirror.watch_model(model)

    def _changed(self) -> None:
        self.changes += 1

    def blocks(self, worker: str = WORKER, tier: BlockTier = BlockTier.DEVICE) -> frozenset[bytes] | None:
        """Returns the mirrored blocks of a worker, or None if the mirror has no owner number for the worker."""
        number = self.mirror.owner_of(worker)
        return None if number < 0 else self.index.blocks(number, tier)


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled(), "the work runs until it is cancelled"


@asynccontextmanager
async def mirrored(server: RedisServer, *models: str) -> AsyncIterator[MirroredIndex]:
    copy = MirroredIndex(server, *models)
    async with running(copy.mirror.run()):
        yield copy


@asynccontextmanager
async def published(
    server: RedisServer, generation: int = 1, worker: str = WORKER, model: str = MODEL
) -> AsyncIterator[IndexPublisher]:
    publisher = IndexPublisher(server.url, model, worker, generation)
    async with running(publisher.run()):
        yield publisher


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def event(seq: int, add: tuple[bytes, ...], removed: tuple[bytes, ...] = (), generation: int = 1) -> IndexEvent:
    return IndexEvent(WORKER, generation, seq, seq == 1, add, removed)


def moved(add: Iterable[bytes], removed: Iterable[bytes] = ()) -> list[BlockMove]:
    device = BlockTier.DEVICE
    return [*(BlockMove(name, None, device) for name in add), *(BlockMove(name, device, None) for name in removed)]


# Tests with real publishers


def test_two_mirrors_agree_with_the_workers(server: RedisServer) -> None:
    """The early mirror runs from the start. The late mirror starts later and first reads the blocks that Redis already has."""

    async def body() -> None:
        rng = random.Random(7)
        async with AsyncExitStack() as stack:
            early = await stack.enter_async_context(mirrored(server))
            workers = [await stack.enter_async_context(published(server, n, f"w{n}")) for n in (1, 2, 3)]
            late: MirroredIndex | None = None
            for turn in range(80):
                for publisher in workers:
                    names = rng.sample(range(4000), rng.randrange(250))
                    parts = [tuple(map(block, names[at::5])) for at in range(5)]
                    flushed = turn == 30 and publisher is workers[0]
                    publisher.cached(CacheEvents(flushed, (*parts[0], *parts[4]), *parts[1:4]))
                if turn == 40:
                    late = await stack.enter_async_context(mirrored(server))
                await asyncio.sleep(0.01)
            assert late is not None

            def agree(copy: MirroredIndex) -> bool:
                each = [(n, tier) for n in (1, 2, 3) for tier in BlockTier]
                found = [(copy.blocks(f"w{n}", tier), workers[n - 1].blocks.in_tier(tier)) for n, tier in each]
                return all(mirrored and mirrored == held for mirrored, held in found)

            await until(lambda: agree(early) and agree(late) and not any(w.blocks.num_pending for w in workers))
            assert (
                dict(early.mirror.leases) == dict(late.mirror.leases) == {f"w{n}": workers[n - 1].generation for n in (1, 2, 3)}
            )
            assert workers[0].generation != 1 and workers[1].generation == 2, "the cache of the first worker was flushed"
            assert early.mirror.counts.gaps == late.mirror.counts.gaps == 0 and late.mirror.counts.loads >= 3
            assert early.mirror.available and early.mirror.lag_s < 5 and early.changes > 0
            assert early.mirror.lease_alive("w2", 2) is True and early.mirror.lease_alive("w2") is True
            assert early.mirror.lease_alive("w2", 99) is None and early.mirror.lease_alive("unheard of") is None

    run(body)


def test_mirror_reads_many_blocks_of_a_worker_in_parts(server: RedisServer) -> None:
    async def body() -> None:
        client = redis_client(server.url, 5.0)
        records = WorkerRecords(client, MODEL, WORKER)
        await records.register(1, 1)
        names = blocks(*range(7000))
        for at in range(0, 7000, 500):
            await records.publish(1, 1 + at // 500, moved(names[at : at + 500]))
        async with mirrored(server) as copy:
            await until(lambda: copy.blocks() == frozenset(names))
            await records.publish(1, 15, moved(blocks(9000), names[:10]))
            await until(lambda: copy.blocks() == frozenset((*names[10:], block(9000))))
            assert copy.mirror.counts.gaps == 0
        await client.aclose()

    run(body)


def test_mirror_drops_blocks_of_older_generations_after_a_restart_or_a_flush(server: RedisServer) -> None:
    async def body() -> None:
        async with mirrored(server) as copy:
            async with published(server, 1) as first:
                first.cached(stored(1, 2, 3))
                await until(lambda: copy.blocks() == {*blocks(1, 2, 3)})
                old = copy.mirror.owner_of(WORKER)
                server.client.set("kept", server.client.get(lease_key(WORKER)) or b"")
            server.client.rename("kept", lease_key(WORKER))  # restores the lease, as if the worker had been killed
            async with published(server, 2) as second:
                await until(lambda: copy.blocks() == frozenset())
                assert copy.index.blocks(old) == frozenset() and not copy.index.match(blocks(1, 2, 3)).any()
                second.cached(stored(4))
                await until(lambda: copy.blocks() == {block(4)})
                second.cached(CacheEvents(True, blocks(5), ()))
                await until(lambda: copy.blocks() == {block(5)})
                assert copy.mirror.leases[WORKER] == second.generation != 2
                await until(lambda: copy.index.num_blocks == 1)  # the blocks of retired owners are swept
            await until(lambda: copy.mirror.owner_of(WORKER) == -1 or copy.mirror.lease_alive(WORKER) is not True)

    run(body)


def test_mirror_follows_several_models(server: RedisServer) -> None:
    async def body() -> None:
        async with published(server, 1, "a", "x") as a, published(server, 2, "b", "y") as b, mirrored(server, "x") as copy:
            a.cached(stored(1))
            b.cached(stored(2))
            await until(lambda: copy.blocks("a") == {block(1)})
            assert copy.blocks("b") is None
            copy.mirror.watch_model("y")
            copy.mirror.watch_model("x")
            await until(lambda: copy.blocks("b") == {block(2)})
            b.cached(stored(3))
            await until(lambda: copy.blocks("b") == {*blocks(2, 3)} and copy.blocks("a") == {block(1)})

    run(body)


def test_mirror_drops_the_blocks_of_a_worker_after_the_lease_of_the_worker_ends(server: RedisServer) -> None:
    async def body() -> None:
        now = [1000.0]
        copy = MirroredIndex(server, clock=lambda: now[0])
        client = redis_client(server.url, 2.0)
        records = WorkerRecords(client, MODEL, WORKER)
        await records.register(1, 1)
        await records.publish(1, 1, moved(blocks(1)))
        async with running(copy.mirror.run()):
            await until(lambda: copy.blocks() == {block(1)})
            server.client.delete(lease_key(WORKER))
            now[0] += 2
            await until(lambda: WORKER not in copy.mirror.leases)
            assert copy.blocks() == {block(1)} and copy.mirror.lease_alive(WORKER, 1) is None, (
                "until LEASE_TTL_S after a reconnection, a missing lease does not mean a lost worker"
            )
            now[0] += LEASE_TTL_S
            await until(lambda: copy.blocks() is None)
            assert copy.mirror.lease_alive(WORKER, 1) is False and copy.mirror.lease_alive(WORKER, 2) is None
            assert not copy.index.match(blocks(1)).any()
        await client.aclose()

    run(body)


# Tests with faults of Redis


@pytest.mark.by_day(one_in=2)
def test_mirror_recovers_when_redis_restarts_empty(own_server: RedisServer) -> None:
    async def body() -> None:
        async with published(own_server) as publisher, mirrored(own_server) as copy:
            publisher.cached(stored(*range(600)))
            await until(lambda: copy.blocks() == publisher.blocks.in_tier())
            own_server.kill()
            await until(lambda: not copy.mirror.available)
            assert copy.blocks() == {*blocks(*range(600))}, "routing continues with the known blocks"
            assert copy.mirror.lease_alive(WORKER, 1) is None
            publisher.cached(CacheEvents(False, blocks(1000), blocks(0)))
            await until(lambda: publisher.counts.failures > 0)
            own_server.start()
            await until(lambda: publisher.generation != 1 and copy.blocks() == publisher.blocks.in_tier())
            assert copy.mirror.leases[WORKER] == publisher.generation
            publisher.cached(stored(5000))
            await until(lambda: copy.blocks() == {*blocks(*range(1, 600), 1000, 5000)})

    run(body)


@pytest.mark.by_day(one_in=2, seed=2)
def test_mirror_keeps_blocks_of_workers_for_lease_ttl_s_after_redis_returns_empty(own_server: RedisServer) -> None:
    async def body() -> None:
        now = [1000.0]
        copy = MirroredIndex(own_server, clock=lambda: now[0])
        client = redis_client(own_server.url, 2.0)
        records = WorkerRecords(client, MODEL, WORKER)
        await records.register(1, 1)
        await records.publish(1, 1, moved(blocks(1)))
        async with running(copy.mirror.run()):
            await until(lambda: copy.blocks() == {block(1)})
            now[0] += LEASE_TTL_S
            own_server.kill()
            await until(lambda: not copy.mirror.available)
            now[0] += LEASE_TTL_S
            own_server.start()
            await until(lambda: copy.mirror.available)
            assert copy.blocks() == {block(1)} and copy.mirror.lease_alive(WORKER, 1) is None
            now[0] += LEASE_TTL_S
            await until(lambda: copy.blocks() is None)
            assert copy.mirror.lease_alive(WORKER, 1) is False
        await client.aclose()

    run(body)


@pytest.mark.by_day(one_in=2)
def test_mirror_recovers_when_redis_hangs(own_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(publishing, "RENEW_S", 0.5)

    async def body() -> None:
        async with published(own_server) as publisher, mirrored(own_server) as copy:
            publisher.cached(stored(1, 2))
            await until(lambda: copy.blocks() == {*blocks(1, 2)})
            with own_server.stopped():
                await until(lambda: not copy.mirror.available)
                assert copy.blocks() == {*blocks(1, 2)}
                lag_s = copy.mirror.lag_s
                await asyncio.sleep(0.05)
                assert copy.mirror.lag_s > lag_s
                publisher.cached(stored(3))
            await until(lambda: copy.mirror.available and copy.blocks() == {*blocks(1, 2, 3)})

    run(body)


@pytest.mark.by_day(one_in=2)
def test_mirror_recovers_when_redis_is_full(own_server: RedisServer) -> None:
    async def body() -> None:
        async with published(own_server) as publisher, mirrored(own_server) as copy:
            publisher.cached(stored(*range(100)))
            await until(lambda: copy.blocks() == publisher.blocks.in_tier())
            own_server.client.config_set("maxmemory", "1mb")
            publisher.cached(CacheEvents(False, blocks(*range(200, 300)), blocks(*range(50))))
            await until(lambda: publisher.counts.failures > 1)
            assert (
                copy.mirror.available and copy.mirror.lease_alive(WORKER, 1) is True and copy.blocks() == {*blocks(*range(100))}
            )
            own_server.client.config_set("maxmemory", "0")
            await until(lambda: copy.blocks() == publisher.blocks.in_tier() == {*blocks(*range(50, 100), *range(200, 300))})

    run(body)


# Tests with incomplete event streams


@asynccontextmanager
async def manual_worker(server: RedisServer) -> AsyncIterator[tuple[MirroredIndex, WorkerRecords]]:
    """Yields a mirror that has blocks 1 and 2 from two events of WORKER's generation 1. Also yields the records of WORKER."""
    client = redis_client(server.url, 2.0)
    records = WorkerRecords(client, MODEL, WORKER)
    await records.register(1, 1)
    await records.publish(1, 1, moved(blocks(1)))
    async with mirrored(server) as copy:
        await until(lambda: copy.blocks() == {block(1)})
        await records.publish(1, 2, moved(blocks(2)))
        await until(lambda: copy.blocks() == {*blocks(1, 2)})
        yield copy, records
    await client.aclose()


def change_without_event(server: RedisServer, add: int, seq: int) -> None:
    """Changes blocks of WORKER and removes the event from the stream before a mirror can read it."""
    pipe = server.client.pipeline(transaction=True)
    pipe.sadd(own_key(WORKER, 1), block(add))
    pipe.srem(own_key(WORKER, 1), block(1))
    pipe.xadd(events_key(MODEL), event(seq, blocks(add), blocks(1)).fields())
    pipe.xtrim(events_key(MODEL), maxlen=0, approximate=False)
    pipe.execute()


def test_mirror_reads_all_blocks_when_events_are_trimmed(server: RedisServer) -> None:
    async def body() -> None:
        async with manual_worker(server) as (copy, records):
            change_without_event(server, 3, seq=3)
            await records.publish(1, 4, moved(blocks(4)))
            await until(lambda: copy.blocks() == {*blocks(2, 3, 4)})
            assert copy.mirror.counts.gaps >= 1
            await records.publish(1, 5, moved(blocks(5)))
            await until(lambda: copy.blocks() == {*blocks(2, 3, 4, 5)})

    run(body)


def test_mirror_notices_trimmed_events_of_a_silent_worker(server: RedisServer) -> None:
    """The worker sends no event after the lost one, so the mirror can notice the loss only by the trim of the stream."""

    async def body() -> None:
        async with manual_worker(server) as (copy, _):
            change_without_event(server, 3, seq=3)
            async with published(server, 9, "other") as other:
                other.cached(stored(1))
                await until(lambda: copy.blocks() == {*blocks(2, 3)})
                assert copy.blocks("other") == {block(1)}

    run(body)


def test_mirror_reads_blocks_again_after_a_gap(server: RedisServer) -> None:
    async def body() -> None:
        async with manual_worker(server) as (copy, records):
            server.client.sadd(own_key(WORKER, 1), block(3))  # block of event 3, which is missing
            await records.publish(1, 4, moved(blocks(4)))
            await until(lambda: copy.blocks() == {*blocks(1, 2, 3, 4)})
            assert copy.mirror.counts.gaps == 1 and copy.mirror.counts.loads == 2

    run(body)


def test_mirror_skips_invalid_entries(server: RedisServer) -> None:
    async def body() -> None:
        async with manual_worker(server) as (copy, records):
            for fields in (
                {b"a": b"b"},
                event(3, blocks(3)).fields() | {b"stored": b"123"},
                event(3, ()).fields() | {b"gen": b"x"},
            ):
                server.client.xadd(events_key(MODEL), fields)
            server.client.xadd(events_key(MODEL), event(7, blocks(99), generation=1234).fields())  # a generation without a lease
            server.client.sadd(f"workers:{{{MODEL}}}", b"\xff\xfe")
            await records.publish(1, 3, moved(blocks(4)))
            await until(lambda: copy.blocks() == {*blocks(1, 2, 4)})
            assert copy.mirror.counts.bad_events == 3 and copy.mirror.num_owners == 1 and copy.index.num_blocks == 3

    run(body)


def test_mirror_ignores_late_events_of_an_old_generation(server: RedisServer) -> None:
    async def body() -> None:
        async with manual_worker(server) as (copy, records):
            await records.register(2, 1)
            await records.publish(2, 1, moved(blocks(7)))
            await records.publish(1, 3, moved(blocks(3)))
            await records.publish(2, 2, moved(blocks(8)))
            await until(lambda: copy.blocks() == {*blocks(7, 8)})
            assert copy.mirror.counts.gaps == 0

    run(body)


# Tests of MirroredOwners and LeaseTable


def test_events_are_classified_as_new_or_old_or_gap_or_foreign() -> None:
    index = PrefixIndex()
    owners = MirroredOwners(index)
    assert owners.apply(event(1, blocks(1))) is Applied.FOREIGN and owners.number(WORKER) == -1
    number = owners.adopt(WORKER, 1, None)
    assert owners.apply(event(5, blocks(1, 2))) is Applied.NEW, "the first event after the blocks were read"
    assert owners.apply(event(6, blocks(3), blocks(1))) is Applied.NEW
    assert owners.apply(event(5, blocks(1, 2))) is Applied.OLD
    assert index.blocks(number) == {*blocks(2, 3)}
    assert owners.apply(event(8, blocks(4))) is Applied.GAP
    assert owners.apply(event(9, (), generation=2)) is Applied.FOREIGN
    again = owners.adopt(WORKER, 1, 9)
    assert again != number and index.blocks(again) == frozenset() and not index.match(blocks(2)).any()


def test_lease_table_reports_a_lost_lease_only_after_lease_ttl_s() -> None:
    table = LeaseTable()
    table.note_recovery(100.0)
    assert table.alive("w", 1, 200.0) is None, "whether a worker that is not in the table is alive is unknown"
    assert table.update("w", 1) and not table.update("w", 1)
    assert [table.alive("w", generation, 101.0) for generation in (0, 1, 2)] == [True, True, None]
    assert table.update("w", None) and not table.update("w", None)
    assert [table.alive("w", generation, 101.0) for generation in (0, 1, 2)] == [None, None, None], (
        "until LEASE_TTL_S after a reconnection, a missing lease does not mean a lost worker"
    )
    settled = 100.0 + LEASE_TTL_S
    assert [table.alive("w", generation, settled) for generation in (0, 1, 2)] == [False, False, None]
    assert table.update("w", 2) and table.alive("w", 2, settled) is True and table.alive("w", 1, settled) is None
