"""Tests of the worker's part of the prefix index: after a fault of the worker or of Redis, Redis has the worker's blocks."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock_llm.protos import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.index.prefix_index import (
    BELOW_TTL_S,
    EVENTS_KEPT,
    BlockTier,
    IndexEvent,
    block_hashes,
    cache_namespace,
    end_mark,
    event_from,
    events_key,
    generations_key,
    lease_key,
    own_key,
    owner_field,
    root_hash,
    split_hashes,
    workers_key,
)
from rootstock_llm.services.shared.index.redis_client import redis_client
from rootstock_llm.services.shared.sampling_parameters import SamplingDefaults
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents
from rootstock_llm.services.worker.core.kv.radix_cache import tree_name
from rootstock_llm.services.worker.identity.model_identity import ServedWeights, identify_model
from rootstock_llm.services.worker.index import publisher as publishing
from rootstock_llm.services.worker.index.publisher import CacheEventHandover, IndexPublisher
from rootstock_llm.services.worker.index.records import BlockMove, CachedBlocks, WorkerRecords
from rootstock_llm.services.worker.index.sweeper import LATE_S, Sweeper
from tests.exec.tiny_models import MODELS
from tests.services.redis_server import EITHER_SERVER, RedisServer, redis_server, until
from tests.services.worker.identity.test_model_identity import identity_of, revision_of

MODEL, WORKER = "m", "worker-1"
DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"


def block(number: int) -> bytes:
    return number.to_bytes(8, "big")


def blocks(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(block, numbers))


def stored(*numbers: int) -> CacheEvents:
    return CacheEvents(False, blocks(*numbers), ())


CLEARED = CacheEvents(True, (), ())
LOWER_TIERS = (BlockTier.HOST, BlockTier.STORAGE)


@pytest.fixture(params=EITHER_SERVER)
def own_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Yields a server that the test may break."""
    with redis_server(request.param) as server:
        yield server


@pytest.fixture
def quick_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "RENEW_S", 0.2)


@asynccontextmanager
async def published(server: RedisServer, generation: int = 1) -> AsyncIterator[IndexPublisher]:
    publisher = IndexPublisher(server.url, MODEL, WORKER, generation)
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.done()


def owned(server: RedisServer, publisher: IndexPublisher, tier: BlockTier = BlockTier.DEVICE) -> set[bytes]:
    return set(server.client.smembers(own_key(WORKER, publisher.generation, tier)))


def in_agreement(server: RedisServer, publisher: IndexPublisher) -> bool:
    """Returns whether lease, block keys and events in Redis agree with the publisher, also for gateways that ignore tiers."""
    if publisher.blocks.num_pending or server.client.get(lease_key(WORKER)) != str(publisher.generation).encode():
        return False
    field = owner_field(WORKER, publisher.generation).encode()
    owned_names = {name for name, owners in server.block_keys().items() if field in owners}
    from_events = replayed(server, publisher.generation)
    cached = [publisher.blocks.in_tier(tier) for tier in BlockTier]
    tiers = [owned(server, publisher, tier) for tier in BlockTier] == cached == from_events
    return tiers and owned_names == replayed_before_tiers(server, publisher.generation) == publisher.blocks.in_tier()


def replayed_before_tiers(server: RedisServer, generation: int) -> set[bytes]:
    """Returns the blocks that a gateway derives from the event fields `stored` and `removed`, without tiers."""
    names: set[bytes] = set()
    for _, values in server.client.xrange(events_key(MODEL)):
        if int(values[b"gen"]) == generation:
            names |= set(split_hashes(values[b"stored"]))
            names -= set(split_hashes(values[b"removed"]))
    return names


def replayed(server: RedisServer, generation: int) -> list[set[bytes]]:
    """Returns the blocks by tier that a gateway derives from the event stream. Asserts that sequence numbers have no gaps."""
    tiers: dict[bytes, BlockTier] = {}
    expected = 1
    for _, values in server.client.xrange(events_key(MODEL)):
        event = event_from(values)
        if event.generation == generation:
            assert (event.seq, event.cleared) == (expected, expected == 1)
            expected += 1
            tiers |= dict.fromkeys(event.stored, BlockTier.DEVICE)
            tiers = {block: tier for block, tier in tiers.items() if block not in event.removed}
            tiers |= dict.fromkeys(event.host, BlockTier.HOST) | dict.fromkeys(event.storage, BlockTier.STORAGE)
    return [{block for block, where in tiers.items() if where is tier} for tier in BlockTier]


def moved(names: Iterable[bytes], tier: BlockTier = BlockTier.DEVICE) -> list[BlockMove]:
    """Returns a move of each block into this tier. The blocks were in no tier before."""
    return [BlockMove(name, None, tier) for name in names]


def run(test: Callable[[], Awaitable[None]], limit_s: float = 120) -> None:
    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await test()

    asyncio.run(limited())


STEPS = ["stored", "host", "storage", "removed", "clear", "take", "restart"]
CHANGES = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 6)), max_size=60)
TIERS = {"stored": BlockTier.DEVICE, "host": BlockTier.HOST, "storage": BlockTier.STORAGE, "removed": None}


@given(CHANGES)
def test_published_moves_of_blocks_make_redis_equal_to_the_cached_blocks(changes: list[tuple[str, int]]) -> None:
    cached, expected, remote = CachedBlocks(), dict[bytes, BlockTier](), dict[bytes, BlockTier]()

    def take(limit: int) -> None:
        for move in cached.take(limit):
            assert remote.pop(move.block, None) is move.before is not move.after, "a move changes the tier of a block"
            if move.after is not None:
                remote[move.block] = move.after

    for step, number in changes:
        name = block(number)
        if step in TIERS:
            cached.merge(CacheEvents(**{"cleared": False, "stored": (), "removed": (), step: (name,)}))
            expected.pop(name, None)
            expected |= {} if (tier := TIERS[step]) is None else {name: tier}
        elif step == "take":
            take(number)
        else:
            if step == "clear":
                cached.merge(CLEARED)
                expected.clear()
            cached.restart()
            remote.clear()
        assert cached.num_pending <= len(expected | remote), "a block has at most one pending move"
        assert cached.num_cached == len(expected)
        for tier in BlockTier:
            assert cached.num_published(tier) == list(remote.values()).count(tier)
            assert cached.num_in(tier) == list(expected.values()).count(tier)
    take(1000)
    assert {name: tier for tier in BlockTier for name in cached.in_tier(tier)} == expected == remote
    assert not cached.num_pending


def test_cache_events_are_applied_in_the_order_clear_stored_removed() -> None:
    cached = CachedBlocks()
    cached.merge(stored(1, 2))
    cached.take(10)
    cached.merge(CacheEvents(True, blocks(3, 4), blocks(4)))
    assert cached.in_tier() == {block(3)} and cached.take(10) == [BlockMove(block(3), None, BlockTier.DEVICE)]


THOUSAND = CacheEvents(False, *(blocks(*range(at, 1000, 4)) for at in range(4)))


def test_events_from_another_thread_arrive_completely_and_in_order() -> None:
    async def body() -> None:
        got: list[bytes] = []
        handover = CacheEventHandover(asyncio.get_running_loop(), lambda events: got.extend(events.stored))
        thread = threading.Thread(target=lambda: [handover.put(stored(number)) for number in range(2000)])
        thread.start()
        await until(lambda: len(got) == 2000)
        thread.join()
        assert got == list(map(block, range(2000)))

    run(body)


def test_loop_iteration_delivers_many_small_or_few_large_event_messages() -> None:
    async def body() -> None:
        iterations, taken, got = 0, list[int](), 0

        def deliver(_: CacheEvents) -> None:
            nonlocal got
            got += 1

        handover = CacheEventHandover(asyncio.get_running_loop(), deliver)
        for messages in ([CacheEvents(False, blocks(number), ()) for number in range(1000)], [THOUSAND] * 12):
            got, before = 0, iterations
            for each in messages:
                handover.put(each)
            while got < len(messages) and iterations < before + 100:
                await asyncio.sleep(0)
                iterations += 1
            taken.append(iterations - before)
        assert taken[0] <= 2 and 3 <= taken[1] <= 4, "an iteration delivers 1000 small messages, or 3 to 4 large messages"

    run(body)


def test_random_changes_of_the_cache_reach_redis(server: RedisServer) -> None:
    async def body() -> None:
        rng = random.Random(4)
        async with published(server, generation=77) as publisher:
            for _ in range(60):
                names = rng.sample(range(3000), rng.randrange(200))
                parts = [tuple(map(block, names[at::5])) for at in range(5)]
                publisher.cached(CacheEvents(False, (*parts[0], *parts[4]), *parts[1:4]))
                await asyncio.sleep(0.01)
            await until(lambda: in_agreement(server, publisher))
            assert publisher.generation == 77 and publisher.lease_held and len(publisher.blocks.in_tier()) > 500
            assert all(len(publisher.blocks.in_tier(tier)) > 300 for tier in LOWER_TIERS)
            assert all(0 < server.client.ttl(own_key(WORKER, 77, tier)) <= BELOW_TTL_S for tier in LOWER_TIERS)
            await until(lambda: publisher.seq == server.client.xlen(events_key(MODEL)))
            assert publisher.seq == server.client.xlen(events_key(MODEL)) == publisher.counts.events
            assert server.client.smembers(generations_key(WORKER)) == {b"77"}
            assert server.client.smembers(workers_key(MODEL)) == {WORKER.encode()}
            assert 0 < server.client.ttl(lease_key(WORKER)) <= 10
        assert server.client.get(lease_key(WORKER)) is None, "the publisher deletes its lease when it ends"

    run(body)


def test_large_batches_of_blocks_are_split(server: RedisServer) -> None:
    async def body() -> None:
        async with published(server) as publisher:
            publisher.cached(stored(*range(2300)))
            await until(lambda: in_agreement(server, publisher))
            sizes = [len(event_from(values).stored) for _, values in server.client.xrange(events_key(MODEL))]
            assert sum(sizes) == 2300 and max(sizes) <= publishing.BATCH_BLOCKS

    run(body)


def test_cache_flush_starts_one_new_generation(server: RedisServer) -> None:
    async def body() -> None:
        async with published(server) as publisher:
            publisher.cached(stored(1, 2, 3))
            await until(lambda: in_agreement(server, publisher))
            publisher.cached(CacheEvents(True, blocks(9), ()))
            await until(lambda: publisher.counts.generations == 2 and in_agreement(server, publisher))
            assert publisher.blocks.in_tier() == {block(9)}
            assert server.client.smembers(own_key(WORKER, 1)) == set(blocks(1, 2, 3)), "the blocks are left for the sweeper"

    run(body)


def test_event_stream_in_redis_is_trimmed(server: RedisServer) -> None:
    async def body() -> None:
        client = redis_client(server.url, 2.0)
        records = WorkerRecords(client, MODEL, WORKER)
        pipe = server.client.pipeline(transaction=False)
        for seq in range(EVENTS_KEPT + 300):
            pipe.xadd(events_key(MODEL), IndexEvent("other", 5, seq, False, (), ()).fields())
        pipe.execute()
        await records.publish(1, 1, moved(blocks(1)))
        await client.aclose()
        assert EVENTS_KEPT <= server.client.xlen(events_key(MODEL)) < EVENTS_KEPT + 300

    run(body)


@pytest.mark.by_day(one_in=2)
def test_index_is_rebuilt_when_redis_restarts_empty(own_server: RedisServer) -> None:
    async def body() -> None:
        async with published(own_server) as publisher:
            publisher.cached(stored(*range(700)))
            await until(lambda: in_agreement(own_server, publisher))
            own_server.kill()
            publisher.cached(CacheEvents(False, blocks(1000, 1001), blocks(0, 1)))
            await until(lambda: publisher.counts.failures > 0)
            publisher.cached(CacheEvents(False, blocks(2000), blocks(1000)))
            own_server.start()
            await until(lambda: in_agreement(own_server, publisher))
            assert publisher.blocks.in_tier() == {*map(block, range(2, 700)), block(1001), block(2000)}
            assert publisher.generation != 1 and publisher.counts.republished >= 700

    run(body)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.usefixtures("quick_renewal")
def test_publisher_reconnects_when_the_server_becomes_a_replica(own_server: RedisServer) -> None:
    def connections() -> set[str]:
        return {found["id"] for found in own_server.client.client_list()} - {str(own_server.client.client_id())}

    async def body() -> None:
        async with published(own_server) as publisher:
            publisher.cached(stored(1, 2))
            await until(lambda: in_agreement(own_server, publisher))
            before = connections()
            own_server.client.execute_command("REPLICAOF", "127.0.0.1", "1")
            publisher.cached(stored(3))
            await until(lambda: publisher.counts.failures > 1)
            await until(lambda: not before & connections())
            assert publisher.counts.generations == 1
            own_server.client.execute_command("REPLICAOF", "NO", "ONE")
            await until(lambda: in_agreement(own_server, publisher))

    run(body)


@pytest.mark.usefixtures("quick_renewal")
def test_publisher_recovers_from_an_unexpected_exception(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with published(server) as publisher:
            publisher.cached(stored(1, 2))
            await until(lambda: in_agreement(server, publisher))
            with monkeypatch.context() as patch:
                patch.setattr(WorkerRecords, "renew", lambda self, generation: {}["run_id"])
                await until(lambda: publisher.counts.failures > 0)
            await until(lambda: publisher.counts.generations == 2 and in_agreement(server, publisher))
            assert publisher.lease_held

    run(body)


@pytest.mark.by_day(one_in=2, seed=52)
@pytest.mark.usefixtures("quick_renewal")
@pytest.mark.parametrize("loss", ["all", "lease", "own", "below", "one block", "generations", "workers", "another's lease"])
def test_idle_publisher_notices_lost_records_in_redis(server: RedisServer, loss: str) -> None:
    lose: dict[str, Callable[[], object]] = {
        "all": server.client.flushall,
        "lease": lambda: server.client.delete(lease_key(WORKER)),
        "own": lambda: server.client.delete(own_key(WORKER, 1)),
        "below": lambda: server.client.delete(own_key(WORKER, 1, BlockTier.STORAGE)),
        "one block": lambda: server.client.srem(own_key(WORKER, 1), block(2)),
        "generations": lambda: server.client.delete(generations_key(WORKER)),
        "workers": lambda: server.client.delete(workers_key(MODEL)),
        "another's lease": lambda: server.client.set(lease_key(WORKER), 12345),
    }

    async def body() -> None:
        async with published(server) as publisher:
            publisher.cached(CacheEvents(False, blocks(1, 2, 3), (), (), blocks(4)))
            await until(lambda: in_agreement(server, publisher))
            lose[loss]()
            await until(lambda: publisher.counts.generations == 2 and in_agreement(server, publisher))
            assert server.client.sismember(generations_key(WORKER), str(publisher.generation))
            assert server.client.sismember(workers_key(MODEL), WORKER)
            await asyncio.sleep(0.3)
            assert publisher.counts.generations == 2, "the publisher starts one new generation"

    run(body)


@pytest.mark.by_day(one_in=2)
@pytest.mark.usefixtures("quick_renewal")
def test_publisher_keeps_the_lease_when_redis_is_full(own_server: RedisServer) -> None:
    """Redis refuses writes. The lease is still renewed, and all changes are published when Redis has free memory."""

    async def body() -> None:
        async with published(own_server) as publisher:
            publisher.cached(stored(1, 2, 3))
            await until(lambda: in_agreement(own_server, publisher))
            own_server.client.config_set("maxmemory-policy", "noeviction")
            own_server.client.config_set("maxmemory", "1mb")
            publisher.cached(CacheEvents(False, blocks(*range(10, 400)), blocks(1)))
            await until(lambda: publisher.counts.failures >= 2)
            own_server.client.pexpire(lease_key(WORKER), 1500)
            await until(lambda: own_server.client.pttl(lease_key(WORKER)) > 5000)
            assert publisher.lease_held and publisher.generation == 1, "the generation is not changed"
            publisher.cached(CacheEvents(False, blocks(500), blocks(2)))
            own_server.client.config_set("maxmemory", "0")
            await until(lambda: in_agreement(own_server, publisher))
            assert publisher.generation != 1 and publisher.counts.dropped > 0
            assert publisher.blocks.in_tier() == {block(3), *map(block, range(10, 400)), block(500)}

    run(body)


@pytest.mark.by_day(one_in=2, seed=2)
def test_hanging_redis_does_not_block_the_event_loop(own_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "RENEW_S", 0.5)
    monkeypatch.setattr(publishing, "TIMEOUT_S", 0.5)

    async def body() -> None:
        async with published(own_server) as publisher:
            publisher.cached(stored(1))
            await until(lambda: in_agreement(own_server, publisher))
            with own_server.stopped():
                iterations = 0
                while not publisher.counts.failures:
                    publisher.cached(stored(10 + iterations))
                    iterations += 1
                    await asyncio.sleep(0.005)
                assert iterations > 10, "the event loop is not blocked"
            await until(lambda: in_agreement(own_server, publisher))
            assert len(publisher.blocks.in_tier()) == 1 + iterations

    run(body)


@pytest.mark.by_day(one_in=2)
def test_publisher_can_be_cancelled_when_redis_is_down(own_server: RedisServer) -> None:
    own_server.kill()

    async def body() -> None:
        async with published(own_server) as publisher:
            publisher.cached(stored(1))
            await until(lambda: publisher.counts.failures > 1)
            assert not publisher.lease_held and publisher.seq == 0

    run(body)


async def leave_records(
    server: RedisServer, worker: str, generation: int, numbers: range, leased: bool, model: str = MODEL
) -> None:
    """Writes the records that a killed worker leaves in Redis."""
    client = redis_client(server.url, 2.0)
    records = WorkerRecords(client, model, worker)
    await records.register(generation, generation)
    await records.publish(generation, 1, [*moved(map(block, numbers)), *moved(blocks(1, 2), BlockTier.HOST)])
    if not leased:
        await client.delete(lease_key(worker))
    await client.aclose()


def test_sweeper_removes_dead_generations_and_keeps_live_generations(server: RedisServer) -> None:
    async def body() -> None:
        now = 100.0
        client = redis_client(server.url, 2.0)
        sweeper = Sweeper(client, MODEL, WORKER, clock=lambda: now)
        await leave_records(server, WORKER, 1, range(600), leased=True)
        await leave_records(server, WORKER, 2, range(300, 400), leased=True)
        await leave_records(server, "alive", 3, range(50), leased=True)
        await leave_records(server, "alive", 4, range(20), leased=True)
        await leave_records(server, "dead", 5, range(100), leased=False)

        await sweeper.sweep()
        fields = {field for owners in server.block_keys().values() for field in owners}
        assert fields == {b"worker-1:2", b"alive:4", b"dead:5"}, "a generation without a lease stays until the next sweep"
        now += LATE_S - 1
        await sweeper.sweep()
        assert server.client.scard(own_key("dead", 5)) == 100
        now += 2
        await sweeper.sweep()

        assert server.block_keys() == {
            block(number): {
                name for name, numbers in ((b"alive:4", range(20)), (b"worker-1:2", range(300, 400))) if number in numbers
            }
            for number in (*range(20), *range(300, 400))
        }
        assert server.client.smembers(workers_key(MODEL)) == {WORKER.encode(), b"alive"}
        assert server.client.smembers(generations_key("alive")) == {b"4"} and not server.client.exists(generations_key("dead"))
        assert not list(server.client.scan_iter("own:dead:*")) and sweeper.num_swept == 600 + 50 + 100
        await client.aclose()

    run(body)


def test_sweeper_removes_a_model_without_workers(server: RedisServer) -> None:
    async def body() -> None:
        now = 100.0
        client = redis_client(server.url, 2.0)
        ours, theirs = (Sweeper(client, model, WORKER, clock=lambda: now) for model in (MODEL, "former"))
        await leave_records(server, "last", 7, range(30), leased=False, model="former")
        await leave_records(server, WORKER, 1, range(5), leased=True)
        await theirs.sweep()
        for _ in range(3):
            await ours.sweep()
            now += LATE_S + 1
        assert server.client.smembers("models") == {MODEL.encode()}
        assert not [key for key in server.client.scan_iter() if b"former" in key or b"last" in key]
        assert len(server.block_keys()) == 5
        await client.aclose()

    run(body)


def test_worker_that_has_changed_its_model_removes_the_records_of_the_former_model(server: RedisServer) -> None:
    """Redis has more models than a round sweeps, so that the former model is not swept by chance."""

    async def body() -> None:
        client = redis_client(server.url, 2.0)
        await leave_records(server, WORKER, 1, range(300), leased=True, model="former")
        await Sweeper(client, "former", WORKER).sweep()
        for number, model in enumerate("abcdef"):
            await leave_records(server, f"other-{number}", 5, range(1), leased=True, model=model)
            await Sweeper(client, model, f"other-{number}").sweep()
        await leave_records(server, WORKER, 2, range(5), leased=True)
        await Sweeper(client, MODEL, WORKER).sweep()
        assert not [key for key in server.client.scan_iter() if b"former" in key or key == own_key(WORKER, 1).encode()]
        assert server.client.smembers("models") == {MODEL.encode(), *(name.encode() for name in "abcdef")}
        await client.aclose()

    run(body)


def test_sweeper_keeps_blocks_when_the_lease_returns(server: RedisServer) -> None:
    async def body() -> None:
        now = 100.0
        client = redis_client(server.url, 2.0)
        sweeper = Sweeper(client, MODEL, WORKER, clock=lambda: now)
        await leave_records(server, "late", 5, range(10), leased=False)
        await sweeper.sweep()
        server.client.set(lease_key("late"), 5)
        now += LATE_S + 1
        await sweeper.sweep()
        server.client.delete(lease_key("late"))
        now += 1
        await sweeper.sweep()
        assert server.client.scard(own_key("late", 5)) == 10, "no two sweeps in a row have missed the lease"
        await client.aclose()

    run(body)


def test_restarted_worker_removes_the_blocks_of_the_old_generation(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock_llm.services.worker.index.sweeper.EVERY_S", 0.1)

    async def body() -> None:
        await leave_records(server, WORKER, 1, range(300), leased=True)
        async with published(server, generation=2) as publisher:
            publisher.cached(stored(1, 2))
            await until(lambda: set(server.block_keys()) == set(blocks(1, 2)))
            await until(lambda: server.client.smembers(generations_key(WORKER)) == {b"2"})
            assert publisher.num_swept == 300

    run(body)


def test_model_identity_changes_with_each_file_that_kv_depends_on(tmp_path: Path) -> None:
    for name, content in (("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "w" * 10_000)):
        (tmp_path / name).write_text(content)
    first = identity_of(tmp_path)
    assert first.model == tmp_path.name and first == identify_model(str(tmp_path) + os.sep, "", first.revision)
    weights, other = (ServedWeights(tmp_path, each, SamplingDefaults) for each in (first, identity_of(tmp_path, "other")))
    tree = tree_name(first.revision, "2:ab")
    assert weights.tree_root(tree) == root_hash(tmp_path.name, first.revision, first.tokenizer, "2:ab")
    assert other.tree_root(tree) != weights.tree_root(tree)
    (tmp_path / "model.safetensors").write_text("w" * 9_999 + "v")
    trained = identity_of(tmp_path)
    assert trained.revision != first.revision and trained.tokenizer == first.tokenizer
    (tmp_path / "config.json").write_text('{"rope": 2}')
    assert identity_of(tmp_path).revision != trained.revision
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert identity_of(tmp_path).tokenizer != first.tokenizer


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        return str(response.read().decode())


@pytest.mark.parametrize("has_states", [False, True], ids=["attention", "recurrent layers"])
def test_worker_process_publishes_the_blocks_of_cached_prompts(server: RedisServer, has_states: bool, tmp_path: Path) -> None:
    """The expected block names are computed as in a gateway, from the worker's WorkerInfo.

    If the model has states, the names include end marks.
    """
    port, metrics_port = free_ports(2)
    model, executor = (tmp_path, "cpu") if has_states else (DEMO, "fake")
    if has_states:
        MODELS["qwen3.5"].build(tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, tmp_path / name)
    argv = [sys.executable, "-m", "rootstock_llm.services.worker", "--executor", executor, "--model", str(model)]
    argv += ["--port", str(port), "--metrics-port", str(metrics_port), "--redis-url", server.url, "--max-total-tokens", "4096"]
    argv += ["--fake-step-s", "0", "--grammar-workers", "0", "--num-threads", "1"]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    prompt = list(range(1, 201))

    async def body() -> None:
        often = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=often) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Generate(wait_for_ready=True)
            info = (await call.read()).hello
            assert info.publishes_index and info.revision and info.tokenizer and info.marks_hit_ends is has_states
            for handle, salt in ((1, ""), (2, "mine")):
                submit = worker_pb2.Submit(handle=handle, request_id=str(handle), prompt_ids=prompt, cache_salt=salt)
                submit.sampling.max_new_tokens = 2
                await call.write(worker_pb2.GenerateRequest(submits=[submit]))
            roots = [root_hash(info.model, info.revision, info.tokenizer, cache_namespace("", salt)) for salt in ("", "mine")]
            blocks = [list(split_hashes(block_hashes(root, prompt))) for root in roots]
            expected = {name for names in blocks for name in names}
            assert len(expected) == 6
            if has_states:
                expected |= {end_mark(names[2]) for names in blocks}  # the last page ends after 192 tokens
            await until(lambda: set(server.client.smembers(own_key(info.worker_id, info.generation))) == expected)
            message = await call.read()
            while message.load.index_seq == 0:
                message = await call.read()
            assert message.load.lease_held and message.load.index_generation == info.generation
            assert server.client.smembers(workers_key(info.model)) == {info.worker_id.encode()}
            call.cancel()
            text = await asyncio.to_thread(metrics, metrics_port)
            assert "rootstock_worker_redis_up 1.0" in text
            assert f"rootstock_worker_index_stored_blocks_total {len(expected)}.0" in text
            process.terminate()
            assert await asyncio.to_thread(process.wait, 15) == 0
            assert server.client.get(lease_key(info.worker_id)) is None

    try:
        run(body)
    finally:
        process.kill()
        process.wait()


def test_restarted_worker_process_publishes_the_blocks_of_the_file_tier(server: RedisServer, tmp_path: Path) -> None:
    """The restarted worker publishes the blocks before its first request. Blocks that it reads move to the device tier."""
    port, metrics_port = free_ports(2)
    argv = [sys.executable, "-m", "rootstock_llm.services.worker", "--executor", "cpu", "--model", str(DEMO), "--port", str(port)]
    argv += ["--metrics-port", str(metrics_port), "--redis-url", server.url, "--grammar-workers", "0", "--worker-id", "w"]
    argv += ["--max-total-tokens", "1024", "--enable-hierarchical-cache", "--hicache-size", "1"]
    argv += ["--hicache-storage-backend", "file", "--hicache-storage-dir", str(tmp_path / "kv")]
    prompt = list(range(1, 202))
    processes: list[subprocess.Popen[bytes]] = []

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, stderr=subprocess.DEVNULL)

    def published_in(generation: int, tier: BlockTier) -> set[bytes]:
        return set(server.client.smembers(own_key("w", generation, tier)))

    def is_stored() -> bool:
        return re.search(r"^sglang:backuped_tokens_total{.*} 192.0$", metrics(metrics_port), re.MULTILINE) is not None

    async def run_worker(first: bool) -> tuple[worker_pb2.WorkerInfo, set[bytes]]:
        """Starts a worker process, sends a prompt and kills the process. Returns its WorkerInfo and the prompt's blocks."""
        processes.append(started())
        often = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=often) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Generate(wait_for_ready=True)
            info = (await call.read()).hello
            names = set(split_hashes(block_hashes(root_hash(info.model, info.revision, info.tokenizer, ""), prompt)))
            if not first:
                await until(lambda: published_in(info.generation, BlockTier.STORAGE) == names, seconds=30)
                assert not published_in(info.generation, BlockTier.DEVICE)
            submit = worker_pb2.Submit(handle=1, request_id="1", prompt_ids=prompt)
            submit.sampling.max_new_tokens = 2
            await call.write(worker_pb2.GenerateRequest(submits=[submit]))
            await until(lambda: published_in(info.generation, BlockTier.DEVICE) == names, seconds=30)
            await until(lambda: not first or is_stored(), seconds=30)
            # A block that moves leaves the set of its old tier after it is in the set of its new tier.
            await until(lambda: not published_in(info.generation, BlockTier.STORAGE), seconds=30)
            call.cancel()
        processes[-1].kill()
        await asyncio.to_thread(processes[-1].wait)
        return info, names

    async def body() -> None:
        first, names = await run_worker(first=True)
        second, again = await run_worker(first=False)
        assert names == again and len(names) == 3 and first.generation != second.generation

    try:
        run(body, limit_s=240)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_block_names_follow_the_weights_after_a_resume(server: RedisServer, tmp_path: Path) -> None:
    """The new revision arrives on the open stream, and all blocks published later have names that depend on it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / file).write_bytes((DEMO / file).read_bytes())
    port, metrics_port, control_port = free_ports(3)
    argv = [
        sys.executable,
        "-m",
        "rootstock_llm.services.worker",
        "--executor",
        "fake",
        "--model",
        str(folder),
        "--port",
        str(port),
    ]
    argv += ["--metrics-port", str(metrics_port), "--redis-url", server.url, "--fake-step-s", "0", "--grammar-workers", "0"]
    process = subprocess.Popen([*argv, "--control-port", str(control_port)], stderr=subprocess.DEVNULL)
    prompt = list(range(1, 201))

    async def body() -> None:
        often = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        to_worker, to_control = (grpc.aio.insecure_channel(f"127.0.0.1:{p}", options=often) for p in (port, control_port))
        async with to_worker, to_control:
            call = worker_pb2_grpc.WorkerStub(to_worker).Generate(wait_for_ready=True)
            control = control_pb2_grpc.ControlStub(to_control)
            hello = (await call.read()).hello
            revisions = [hello.revision]
            for handle in (1, 2):
                submit = worker_pb2.Submit(handle=handle, request_id="r", prompt_ids=prompt, revision=hello.revision)
                submit.sampling.max_new_tokens = 2
                await call.write(worker_pb2.GenerateRequest(submits=[submit]))
                root = root_hash(hello.model, hello.revision, hello.tokenizer, "")
                expected = set(split_hashes(block_hashes(root, prompt)))
                await until(lambda: set(server.block_keys()) >= expected)  # noqa: B023
                lease = server.client.get(lease_key(hello.worker_id)).decode()
                assert set(server.client.smembers(own_key(hello.worker_id, int(lease)))) == expected
                if handle == 1:
                    await control.ReleaseMemory(control_pb2.ReleaseMemoryRequest(), wait_for_ready=True)
                    data = bytearray((folder / "model.safetensors").read_bytes())
                    data[len(data) // 2] ^= 1
                    (folder / "model.safetensors").write_bytes(data)
                    await control.ResumeMemory(control_pb2.ResumeMemoryRequest())
                    message = await call.read()
                    while not message.HasField("hello"):
                        message = await call.read()
                    hello = message.hello
                    revisions.append(hello.revision)
            assert revisions[1] == revision_of(folder) != revisions[0]
            call.cancel()

    try:
        run(body)
    finally:
        process.kill()
        process.wait()
