"""The page mover: the order of its copies relative to steps, one fact per operation, and failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.copies import CpuCopies
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.core.contracts.transfers import (
    ALL,
    NO_PAGES,
    UNASKED,
    Deleted,
    Fact,
    OperationKind,
    PageOperation,
    Pull,
    Selection,
    TierBlock,
)
from rootstock_llm.services.worker.core.tiers.page_keys import KEY_BYTES, tag_of
from rootstock_llm.services.worker.exec.contracts.page_store import News
from rootstock_llm.services.worker.exec.kernel_set import copies
from rootstock_llm.services.worker.exec.pools.kv_pool import Arrivals, KVPool, LayerGroups
from rootstock_llm.services.worker.exec.streams.host_streams import HostArrival, HostStreams
from rootstock_llm.services.worker.exec.tiers import page_mover
from rootstock_llm.services.worker.exec.tiers.block_log import BlockLog
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier, PoolReader
from rootstock_llm.services.worker.exec.tiers.page_mover import PageMover
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore

PAGES, HOST_PAGES, DEADLINE_S = 6, 8, 20.0
KEYS = [bytes([number]) * KEY_BYTES for number in range(HOST_PAGES)]


class Moving:
    """A page mover with a random KV pool of two layers with different shapes, a host tier and a file store."""

    def __init__(self, folder: Path) -> None:
        shapes = [(PAGES, 2, 4, 8), (PAGES, 2, 4, 6)], [(PAGES, 1, 4, 16), (PAGES, 1, 4, 16)]
        made = [[torch.randn(shape) for shape in layer] for layer in shapes]
        self.arrivals = Arrivals()
        self.pool = KVPool(tuple(layer[0] for layer in made), tuple(layer[1] for layer in made), self.arrivals)
        self.streams = HostStreams(1)
        self.copier = PageCopier([self.pool], copies("auto", torch.device("cpu")))
        self.host = torch.zeros((HOST_PAGES, self.copier.page_bytes), dtype=torch.uint8)
        self.store = SegmentStore(folder, self.copier.page_bytes, 1 << 24)
        self.woken = threading.Semaphore(0)
        self.mover = PageMover(self.streams, lambda: self.copier, self.arrivals, self.host, self.store)
        self.mover.on_fact = self.woken.release

    def page(self, number: int) -> list[bytes]:
        return [each[number].numpy().tobytes() for pair in zip(self.pool.keys, self.pool.values, strict=True) for each in pair]

    def begin(self, kind: OperationKind, pages: list[int], host_pages: list[int], keys: list[bytes] | None = None) -> None:
        of_device, of_host = (np.array(column, dtype=np.int32) if column else NO_PAGES for column in (pages, host_pages))
        count = max(len(pages), len(host_pages))
        self.mover.begin(PageOperation(7, kind, tuple(keys or KEYS[:count]), of_device, of_host))

    def fact(self) -> Fact:
        """Waits for the next fact of an operation and returns it."""
        while True:
            assert self.woken.acquire(timeout=DEADLINE_S), f"the mover reported no fact within {DEADLINE_S:.0f} s"
            for fact in self.mover.facts():
                if fact.op_id != UNASKED:
                    return fact

    def moved(self, kind: OperationKind, pages: list[int], host_pages: list[int], keys: list[bytes] | None = None) -> Fact:
        self.begin(kind, pages, host_pages, keys)
        return self.fact()

    def delete_stored(self, which: Selection = ALL) -> Deleted:
        done: Future[Deleted] = Future()
        self.mover.delete_stored(which, done)
        return done.result(DEADLINE_S)

    def close(self) -> None:
        self.mover.close()
        self.streams.close()


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    made = Moving(tmp_path / "pages")
    yield made
    made.close()


def test_mover_restores_pages_from_host_and_storage(moving: Moving) -> None:
    before = [moving.page(number) for number in range(PAGES)]
    assert moving.moved(OperationKind.BACK_UP, [1, 4], [6, 0]).count == 2
    assert moving.moved(OperationKind.STORE, [], [6, 0]).stored == tuple(KEYS[:2])
    assert moving.moved(OperationKind.LOAD, [2, 3], [6, 0]).count == 2
    assert moving.moved(OperationKind.FETCH, [5, 0], []).count == 2
    assert [moving.page(number) for number in range(PAGES)] == [before[at] for at in (4, 1, 1, 4, 4, 1)]


def test_shared_storage_stores_pages_when_each_query_for_changes_takes_longer_than_the_time_between_two_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_news(store: SegmentStore) -> News:
        time.sleep(5 * page_mover.NEWS_S)
        return News((), ())

    monkeypatch.setattr(page_mover, "NEWS_S", 0.01)
    monkeypatch.setattr(SegmentStore, "shared", True)
    monkeypatch.setattr(SegmentStore, "news", slow_news)
    moving = Moving(tmp_path / "pages")
    try:
        assert moving.moved(OperationKind.BACK_UP, [1, 4], [6, 0]).count == 2
        assert moving.moved(OperationKind.STORE, [], [6, 0]).stored == tuple(KEYS[:2])
    finally:
        moving.close()


def test_copier_copies_equal_bytes_with_one_call_and_with_numpy() -> None:
    """The copied pieces have various sizes and alignments."""
    pool = KVPool(*(tuple(torch.randn(PAGES, 1, 3, width) for width in widths) for widths in ((7, 64, 1), (5, 33, 16))))
    one_call, by_numpy = PageCopier([pool], CpuCopies(built_library())), PageCopier([pool])
    pages, size = np.array([5, 0, 3], dtype=np.int32), by_numpy.page_bytes

    def content() -> list[bytes]:
        return [each.numpy().tobytes() for each in (*pool.keys, *pool.values)]

    before = content()
    for beside in (0, 1):
        rows = [torch.zeros(3 * size + 1, dtype=torch.uint8)[beside : beside + 3 * size].view(3, size) for _ in range(3)]
        by_numpy.save(pages, rows[0].unbind())
        one_call.save(pages, rows[1].unbind(), streamed=True)
        one_call.save(pages, rows[2].unbind())
        assert rows[0].any() and rows[0].equal(rows[1]) and rows[0].equal(rows[2])
        after = []
        for copier in (by_numpy, one_call):
            copier.restore(rows[0].unbind(), pages[::-1])
            after.append(content())
            copier.restore(rows[0].unbind(), pages)
            assert content() == before
        assert after[0] == after[1] != before
    for page in (PAGES, -1):
        with pytest.raises(IndexError):
            one_call.save(np.array([page], dtype=np.int32), rows[0][:1].unbind())
    with pytest.raises(ValueError, match=f"{size} bytes"):
        one_call.restore([rows[0][0, 1:]], pages[:1])


def test_load_waits_for_steps_that_were_launched_earlier(moving: Moving) -> None:
    """The launched step writes the page after the load was begun. The load must wait and then overwrite the page."""
    moving.moved(OperationKind.BACK_UP, [0], [0])
    going = threading.Event()

    def step() -> None:
        assert going.wait(DEADLINE_S)
        moving.pool.keys[0][3] = torch.nan

    moving.streams.launch(step)
    moving.begin(OperationKind.LOAD, [3], [0])
    time.sleep(0.05)
    assert not moving.mover.facts()
    going.set()
    assert moving.fact().count == 1 and moving.page(3) == moving.page(0)


def test_load_does_not_wait_for_a_backup(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moving.moved(OperationKind.BACK_UP, [1], [0]).count == 1
    going = threading.Event()
    nice: list[int] = []

    def save(pages: Any, rows: Any, streamed: bool) -> None:
        nice.append(os.getpriority(os.PRIO_PROCESS, 0))  # niceness of the calling thread
        assert going.wait(DEADLINE_S)

    monkeypatch.setattr(moving.copier, "save", save)
    moving.begin(OperationKind.BACK_UP, [2, 3], [1, 2])
    assert moving.moved(OperationKind.LOAD, [4], [0]).count == 1 and moving.page(4) == moving.page(1)
    going.set()
    assert moving.fact().count == 2
    assert nice == [max(page_mover.BACK_UP_NICE, os.getpriority(os.PRIO_PROCESS, 0))], (
        "the copy must run at a lower priority than a CPU's steps"
    )


def test_fetch_waits_for_an_earlier_load_into_the_same_page(moving: Moving) -> None:
    """The load was reported before its end. So the core has given its page to another request, which fetches into the page."""
    moving.moved(OperationKind.BACK_UP, [0], [0])
    moving.moved(OperationKind.STORE, [], [0])
    coming = HostArrival(2)
    moving.arrivals.add(np.array([3], dtype=np.int32), LayerGroups.for_pools([2]), coming)
    moving.begin(OperationKind.FETCH, [3], [])
    time.sleep(0.05)
    assert not moving.mover.facts()
    moving.pool.keys[1][3] = torch.nan
    for group in range(2):
        coming.add(group)
    assert moving.fact().count == 1 and moving.page(3) == moving.page(0)


@pytest.mark.parametrize("kind", [OperationKind.BACK_UP, OperationKind.LOAD])
def test_failed_operation_moves_no_page_and_is_reported(
    moving: Moving, kind: OperationKind, caplog: pytest.LogCaptureFixture
) -> None:
    before = [moving.page(number) for number in range(PAGES)]
    assert moving.moved(kind, [PAGES], [0]) == Fact(7), "page PAGES does not exist"
    assert "could not move pages" in caplog.text
    assert [moving.page(number) for number in range(PAGES)] == before
    assert moving.moved(OperationKind.BACK_UP, [0], [0]).count == 1, "the mover must continue after a failure"


def test_closing_the_mover_unpins_host_memory_after_all_copies_have_ended(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host memory must stay pinned and the store open as long as a copy hangs."""
    begun, going, order = threading.Event(), threading.Event(), []

    def save(pages: Any, rows: Any, streamed: bool) -> None:
        begun.set()
        assert going.wait(DEADLINE_S)

    monkeypatch.setattr(page_mover, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(moving.copier, "save", save)
    monkeypatch.setattr(moving.store, "close", lambda: order.append("closed"))
    moving.mover._unpin = lambda: order.append("unpinned")
    moving.begin(OperationKind.BACK_UP, [0], [0])
    assert begun.wait(DEADLINE_S)
    moving.mover.close()
    assert order == []
    going.set()
    monkeypatch.setattr(page_mover, "CLOSE_TIMEOUT_S", DEADLINE_S)
    moving.mover.close()
    assert order == ["unpinned", "closed"]


def test_mover_moves_nothing_while_memory_is_released(moving: Moving) -> None:
    def released() -> PageCopier:
        raise AssertionError("no copier may be used while memory is released")

    moving.mover._copier = released
    assert moving.moved(OperationKind.BACK_UP, [0], [0]).count == 0


def test_fetch_returns_the_pages_before_the_first_missing_page(moving: Moving) -> None:
    moving.moved(OperationKind.BACK_UP, [0], [0])
    moving.moved(OperationKind.STORE, [], [0], KEYS[:1])
    before = moving.page(2)
    fact = moving.moved(OperationKind.FETCH, [1, 2], [], KEYS[:2])
    assert fact.count == 1 and fact.dropped == (KEYS[1],)
    assert moving.page(1) == moving.page(0) and moving.page(2) == before


def test_storage_can_be_filled_again_after_a_deletion(moving: Moving) -> None:
    moving.moved(OperationKind.BACK_UP, [0], [0])
    moving.moved(OperationKind.STORE, [], [0])
    moving.delete_stored()
    fact = moving.moved(OperationKind.FETCH, [1], [])
    assert fact.count == 0 and fact.dropped == (KEYS[0],)
    assert moving.moved(OperationKind.STORE, [], [0]).stored == (KEYS[0],)


def test_load_does_not_wait_for_a_slow_storage(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    moving.moved(OperationKind.BACK_UP, [0], [0])
    going = threading.Event()
    read = moving.store.read

    def slow(keys: list[bytes], out: memoryview) -> int:
        assert going.wait(DEADLINE_S)
        return read(keys, out)

    monkeypatch.setattr(moving.store, "read", slow)
    moving.begin(OperationKind.FETCH, [2], [])
    assert moving.moved(OperationKind.LOAD, [1], [0]).count == 1
    going.set()
    assert moving.fact().count == 0


class Elsewhere:
    """Replaces the reader of remote workers. It fills each page with the number of the reservation.

    A read from the address "gone" returns no pages, and a read from "slow" waits for an event.
    """

    def __init__(self) -> None:
        self.going = threading.Event()
        self.left: list[KvSource] = []

    def read(self, pull: Pull, count: int, out: memoryview, group: int = 0) -> int:
        if pull.source.address == "slow" and not self.going.wait(DEADLINE_S):
            raise AssertionError("the test did not permit the read")
        out[:] = bytes([pull.source.reservation.number]) * len(out)
        return 0 if pull.source.address == "gone" else count

    def leave(self, source: KvSource) -> None:
        self.left.append(source)

    def close(self) -> None:
        self.going.set()


def pull(address: str, number: int, pages: list[int]) -> PageOperation:
    source = KvSource(KvReservation(number, 1, bytes(16)), address, 9)
    column = np.array(pages, dtype=np.int32)
    return PageOperation(number, OperationKind.PULL, tuple(KEYS[: len(pages)]), column, NO_PAGES, pull=Pull(source, 0, bytes(32)))


class OnGpu(HostStreams):
    """Streams whose device is a GPU, although the pools are in host memory."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


class IdleStream:
    """Replaces a CUDA stream whose work is done."""

    def synchronize(self) -> None:
        return


class TestOtherWorkers:
    @pytest.fixture
    def elsewhere(self, moving: Moving) -> Iterator[Elsewhere]:
        """Replaces the mover by one whose reader is the yielded Elsewhere."""
        peers = Elsewhere()
        moving.mover.close()
        moving.mover = PageMover(moving.streams, lambda: moving.copier, moving.arrivals, moving.host, None, peers)
        moving.mover.on_fact = moving.woken.release
        yield peers

    def test_pull_writes_the_pages_of_a_remote_worker(self, moving: Moving, elsewhere: Elsewhere) -> None:
        before = moving.page(0)
        moving.mover.begin(pull("a", 3, [4, 2]))
        assert moving.fact().count == 2 and moving.page(0) == before
        for page in (4, 2):
            assert set(b"".join(moving.page(page))) == {3}

    def test_pulled_pages_are_staged_in_pinned_memory_when_the_device_is_a_gpu(
        self, moving: Moving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This also holds for a decode worker without tiers, whose host tier has no pages."""
        staged, empty, nothing = list[tuple[object, bool]](), torch.empty, torch.empty((0, moving.copier.page_bytes))
        streams = OnGpu(1)
        mover = PageMover(streams, lambda: moving.copier, moving.arrivals, nothing.to(torch.uint8), None, Elsewhere())
        mover.on_fact = moving.woken.release

        def recorded(shape: object, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            staged.append((shape, pin_memory))
            return empty(shape, **options)

        monkeypatch.setattr(torch, "empty", recorded)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: IdleStream())
        mover.begin(pull("a", 3, [4, 2]))
        assert moving.woken.acquire(timeout=DEADLINE_S) and [fact.count for fact in mover.facts()] == [2]
        mover.close()
        streams.close()
        assert staged == [((2, moving.copier.page_bytes), True)]

    def test_failed_pull_writes_nothing(self, moving: Moving, elsewhere: Elsewhere) -> None:
        before = moving.page(4)
        moving.mover.begin(pull("gone", 3, [4]))
        assert moving.fact().count == 0 and moving.page(4) == before

    def test_pull_does_not_wait_for_a_pull_from_a_slow_worker(self, moving: Moving, elsewhere: Elsewhere) -> None:
        moving.mover.begin(pull("slow", 1, [4]))
        moving.mover.begin(pull("a", 2, [5]))
        assert moving.fact().op_id == 2
        elsewhere.going.set()
        assert moving.fact().op_id == 1

    def test_reader_thread_of_an_idle_remote_worker_ends(
        self, moving: Moving, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page_mover, "PEER_IDLE_S", 0.05)
        for number in range(3):
            moving.mover.begin(pull("a", number, [4]))
            assert moving.fact().count == 1
            deadline = time.monotonic() + DEADLINE_S
            while moving.mover._peer_jobs:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def test_reservation_is_released_after_earlier_reads(self, moving: Moving, elsewhere: Elsewhere) -> None:
        slow = pull("slow", 1, [4])
        assert slow.pull is not None
        moving.mover.begin(slow)
        moving.mover.leave(slow.pull.source)
        assert not elsewhere.left
        elsewhere.going.set()
        moving.fact()
        moving.mover.close()
        assert elsewhere.left == [slow.pull.source]


def test_pool_reader_returns_the_bytes_of_the_pool(moving: Moving) -> None:
    read = PoolReader(moving.streams, lambda: moving.copier, moving.arrivals)
    found = bytearray(2 * moving.copier.page_bytes)
    read(np.array([4, 1], dtype=np.int32), memoryview(found))
    assert found == b"".join(moving.page(4)) + b"".join(moving.page(1))


def test_mover_reports_stored_pages_at_the_start(tmp_path: Path) -> None:
    first = Moving(tmp_path / "pages")
    first.moved(OperationKind.BACK_UP, [0, 1], [0, 1])
    first.moved(OperationKind.STORE, [], [0, 1])
    first.close()
    second = Moving(tmp_path / "pages")
    (fact,) = second.mover.facts()
    assert (fact.op_id, fact.stored) == (UNASKED, tuple(KEYS[:2]))
    assert fact.use is not None and fact.use.num_bytes > 2 * second.copier.page_bytes
    second.close()


def test_mover_reports_stored_blocks_at_the_start(tmp_path: Path) -> None:
    """A block is reported if its last page was stored, until the storage is cleared."""
    blocks = (TierBlock(b"firstone", bytes(8), tuple(KEYS[:2])), TierBlock(b"the next", bytes(8), (KEYS[2], KEYS[7])))

    def started() -> tuple[Moving, list[Fact]]:
        made = Moving(tmp_path / "pages")
        made.mover.close()
        made.store = SegmentStore(tmp_path / "pages", made.copier.page_bytes, 1 << 24)
        log = BlockLog(tmp_path / "blocks", b"", made.store.keys)
        made.mover = PageMover(made.streams, lambda: made.copier, made.arrivals, made.host, made.store, log=log)
        made.mover.on_fact = made.woken.release
        return made, made.mover.facts()

    first, _ = started()
    first.moved(OperationKind.BACK_UP, [0, 1, 2], [0, 1, 2])
    host_pages = np.arange(3, dtype=np.int32)
    first.mover.begin(PageOperation(7, OperationKind.STORE, tuple(KEYS[:3]), NO_PAGES, host_pages, blocks=blocks))
    assert first.fact().stored == tuple(KEYS[:3])
    first.close()
    second, facts = started()
    assert [fact.stored for fact in facts] == [tuple(KEYS[:3]), ()] and facts[1] == Fact(UNASKED, blocks=blocks[:1])
    second.delete_stored()
    second.close()
    third, facts = started()
    assert [(fact.stored, fact.blocks) for fact in facts] == [((), ())]
    third.close()


def test_deletion_of_a_salt_runs_after_earlier_operations(moving: Moving) -> None:
    """A write and a read run when the deletion arrives. The written page is deleted, and the read completes.

    A caller that has cancelled its deletion gets no result.
    """
    one, other = KEYS[0], b"o" * KEY_BYTES
    moving.moved(OperationKind.BACK_UP, [0, 1], [0, 1])
    moving.moved(OperationKind.STORE, [], [1], [other])
    reading, going = threading.Event(), threading.Event()
    read = moving.store.read

    def slow(keys: list[bytes], out: memoryview) -> int:
        count = read(keys, out)
        reading.set()
        assert going.wait(DEADLINE_S)
        return count

    moving.store.read = slow  # type: ignore[method-assign, assignment]
    moving.begin(OperationKind.FETCH, [3], [], [other])
    assert reading.wait(DEADLINE_S)
    moving.begin(OperationKind.STORE, [], [0], [one])
    waits, left = Future[Deleted](), Future[Deleted]()
    for done in (waits, left):
        moving.mover.delete_stored(Selection(tag_of(one)), done)
    moving.mover.delete_stored(Selection(tag_of(other)), Future())
    assert left.cancel() and not waits.done()
    going.set()
    assert waits.result(DEADLINE_S) == Deleted(1, (one,))
    facts = moving.mover.facts()
    assert [(fact.op_id, fact.count, fact.stored) for fact in facts[:2]] == [(7, 1, ()), (7, 1, (one,))], (
        "operations that began before the deletion must end first"
    )
    assert facts[2].dropped == (one,)
    assert moving.page(3) == moving.page(1)
    moving.store.read = read  # type: ignore[method-assign]
    assert (
        moving.moved(OperationKind.FETCH, [4], [], [one]).count == moving.moved(OperationKind.FETCH, [4], [], [other]).count == 0
    )


def test_deletion_raises_the_error_of_the_storage(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(which: Selection) -> Deleted:
        raise RuntimeError("no")

    monkeypatch.setattr(moving.store, "delete", broken)
    with pytest.raises(RuntimeError, match="no"):
        moving.delete_stored()
    monkeypatch.undo()
    assert moving.delete_stored() == Deleted(0)
