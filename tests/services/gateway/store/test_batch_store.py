"""Tests of stored files and batches in a real Redis with persistent files: results of lines, quotas and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from rootstock_llm.services.gateway.store.batch_record import BatchOrder, BatchStatus
from rootstock_llm.services.gateway.store.batch_store import BatchStore, LineResult, batch_lease
from rootstock_llm.services.gateway.store.file_store import FileStore
from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost, Leases
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.gateway.store.state_redis import StateRedis
from rootstock_llm.services.gateway.store.stored_files import ERRORS, OUTPUT, FileGone, StoredFile
from tests.services.redis_server import EITHER_SERVER, RedisServer

ALICE = owner_of("alice")
NOW, LATER = 1_900_000_000, 1_900_086_400  # Unix seconds; LATER is a day after NOW
ORDER = BatchOrder("batch_a", ALICE, "alice", "/v1/completions", "file-in", "24h", NOW, LATER, 3600, "file-out", "file-err")


@dataclass
class Stores:
    files: FileStore
    batches: BatchStore
    leases: Leases
    redis: StateRedis


@pytest.fixture(scope="module", params=EITHER_SERVER)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(request.param, tmp_path_factory.mktemp("state"))
    started.start()
    yield started
    started.kill()


def with_stores(
    server: RedisServer, use: Callable[[Stores], Awaitable[None]], max_files: int = 100, max_bytes: int = 1 << 20
) -> None:
    """Runs a test with stores on an empty Redis. `max_files` also limits the batches of an owner."""

    async def run() -> None:
        server.client.flushall()
        redis = StateRedis(server.url, 5)
        leases = Leases(redis, 60)
        try:
            await use(
                Stores(
                    FileStore(redis, max_files, max_bytes), BatchStore(redis, leases, 3600, max_files, max_bytes), leases, redis
                )
            )
        finally:
            await redis.close()

    asyncio.run(run())


def file_of(file_id: str, *chunks: bytes) -> StoredFile:
    return StoredFile(file_id, sum(map(len, chunks)), NOW, LATER, "a.jsonl", "batch", chunks=len(chunks))


async def upload(stores: Stores, file_id: str, *chunks: bytes) -> bool:
    added = [await stores.files.add(ALICE, file_id, number, chunk) for number, chunk in enumerate(chunks)]
    return all(added) and await stores.files.seal(ALICE, file_of(file_id, *chunks))


async def begin(stores: Stores, total: int = 3) -> Lease:
    """Stores ORDER, takes the lease of its batch, and changes the status of the batch to in_progress."""
    assert await stores.batches.begin(ORDER)
    lease = await stores.leases.take(batch_lease(ALICE, ORDER.id))
    assert lease is not None
    progress = {"total": total, "last": total, "model": "demo"}
    for _ in range(2):  # a call is repeated after a lost reply
        assert await stores.batches.advance(lease, ORDER, BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, **progress)
    return lease


async def read(stores: Stores, file: StoredFile) -> bytes:
    return b"".join([piece async for piece in stores.files.content(ALICE, file)])


def results_by(gateway: str, *numbers: int) -> list[LineResult]:
    """Returns a result of 2 input tokens for each line number. The content names the line and the gateway."""
    return [
        LineResult(number, OUTPUT, b"%d by %s\n" % (number, gateway.encode()), usage={"input_tokens": 2}) for number in numbers
    ]


@pytest.mark.by_day(one_in=2)
def test_batch_store_keeps_only_the_first_result_of_a_line(server: RedisServer) -> None:
    async def use(stores: Stores) -> None:
        lease = await begin(stores)
        batches = stores.batches
        assert not await batches.record(lease, ORDER, results_by("one", 2))
        server.client.delete(lease.key)
        with pytest.raises(LeaseLost):
            await batches.record(lease, ORDER, results_by("one", 1))
        other = await stores.leases.take(batch_lease(ALICE, ORDER.id))
        assert other is not None and await batches.lines_with_result(ORDER) == {2}
        failed = LineResult(1, ERRORS, b"1 failed\n", forced=True)
        assert not await batches.record(other, ORDER, [failed, *results_by("two", 1, 2, 3)])
        found = await batches.get(ALICE, ORDER.id)
        assert found is not None and (found.total, found.completed, found.failed, found.usage["input_tokens"]) == (3, 2, 1, 4)
        parts = {OUTPUT: (ORDER.output_id, found.output_bytes), ERRORS: (ORDER.error_id, found.error_bytes)}
        result_files = [
            StoredFile(*parts[part], NOW, LATER, name=part, purpose="batch_output", batch=ORDER.id, part=part, lines=3)
            for part in parts
        ]
        for ends in (True, False):  # the second call finds that the batch has ended
            assert await batches.finish(other, found, BatchStatus.COMPLETED, result_files, LATER) is ends
        assert (
            await read(stores, result_files[0]) == b"2 by one\n3 by two\n"
            and await read(stores, result_files[1]) == b"1 failed\n"
        )
        assert await stores.files.get(ALICE, ORDER.output_id) == result_files[0]
        assert not await batches.is_batch_input(ALICE, "file-in")
        with pytest.raises(LeaseLost):
            await batches.record(other, ORDER, results_by("two", 3))
        assert await stores.files.delete(ALICE, result_files[0])
        # The field "!" counts the bytes of all files of the owner. The 9 bytes of "1 failed\n" are left.
        assert server.client.hget(f"state:filebytes:{ALICE}", "!") == b"9"

    with_stores(server, use)


@pytest.mark.by_day(one_in=2)
def test_batch_store_returns_results_that_exceed_the_quota(server: RedisServer) -> None:
    async def use(stores: Stores) -> None:
        assert await upload(stores, "file-in", b"x" * 90)
        lease = await begin(stores)
        large = LineResult(1, OUTPUT, b"x" * 11)
        assert await stores.batches.record(lease, ORDER, [large, *results_by("a", 2)]) == [large]
        assert not await stores.batches.record(lease, ORDER, [LineResult(1, ERRORS, b"the quota is full\n", forced=True)])
        assert await stores.batches.lines_with_result(ORDER) == {1, 2} and not await stores.files.add(ALICE, "file-b", 0, b"x")
        assert await stores.files.delete(ALICE, file_of("file-in", b"x")) and await stores.files.add(ALICE, "file-b", 0, b"x")

    with_stores(server, use, max_bytes=100)


@pytest.mark.by_day(one_in=2)
def test_file_store_returns_a_file_only_after_all_chunks_are_stored_and_the_file_is_sealed(server: RedisServer) -> None:
    async def use(stores: Stores) -> None:
        files, whole = stores.files, file_of("file-a", b"one", b"two")
        assert await files.add(ALICE, "file-a", 0, b"one") and await files.get(ALICE, "file-a") is None
        assert not await files.seal(ALICE, whole), "a chunk is missing"
        for _ in range(2):  # a call is repeated after a lost reply
            assert await files.add(ALICE, "file-a", 1, b"two")
        assert await files.seal(ALICE, whole) and await files.seal(ALICE, whole)
        assert await read(stores, whole) == b"onetwo" and server.client.hget(f"state:filebytes:{ALICE}", "!") == b"6"
        assert not await upload(stores, "file-b", b"x"), "max_files is 1"
        await files.discard(ALICE, "file-b", 1)
        server.client.delete(f"state:chunk:{ALICE}:file-a:1")
        with pytest.raises(FileGone):
            await read(stores, whole)
        assert not await files.prolong(ALICE, whole, LATER + 1)
        assert await files.delete(ALICE, whole) and not await files.delete(ALICE, whole)
        assert [key for key in server.client.keys("*") if b"chunk" in key or b"file:" in key] == []

    with_stores(server, use, max_files=1)


@pytest.mark.by_day(one_in=2, seed=2)
def test_acknowledged_writes_of_batches_and_files_survive_when_redis_is_killed(server: RedisServer) -> None:
    async def use(stores: Stores) -> None:
        assert await upload(stores, "file-in", b"one", b"two")
        lease = await begin(stores)
        await stores.batches.record(lease, ORDER, results_by("one", 1, 3))
        await asyncio.to_thread(server.wait_until_written)
        server.kill()
        await asyncio.to_thread(server.start)
        assert await stores.leases.renew(lease) and await stores.batches.lines_with_result(ORDER) == {1, 3}
        assert await read(stores, file_of("file-in", b"one", b"two")) == b"onetwo"
        assert await stores.batches.is_batch_input(ALICE, "file-in")
        assert not await stores.batches.is_batch_input(owner_of("bob"), "file-in")

    with_stores(server, use)
