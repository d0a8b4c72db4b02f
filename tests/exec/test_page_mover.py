"""What moves pages beside the steps: behind the steps that were launched before, one fact for each operation, whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.core.contracts.transfers import NO_PAGES, UNASKED, Fact, OperationKind, PageOperation
from services.worker.exec.pools.kv_pool import KVPool
from services.worker.exec.streams.host_streams import HostStreams
from services.worker.exec.tiers.page_copier import PageCopier
from services.worker.exec.tiers.page_mover import PageMover
from services.worker.exec.tiers.segment_store import SegmentStore

PAGES, HOST_PAGES, DEADLINE_S = 6, 8, 20.0
KEYS = [bytes([number]) * 32 for number in range(HOST_PAGES)]


class Moving:
    """Two layers of unlike shapes, every number of them another one."""

    def __init__(self, folder: Path) -> None:
        shapes = [(PAGES, 2, 4, 8), (PAGES, 2, 4, 6)], [(PAGES, 1, 4, 16), (PAGES, 1, 4, 16)]
        made = [[torch.randn(shape) for shape in layer] for layer in shapes]
        self.pool = KVPool(tuple(layer[0] for layer in made), tuple(layer[1] for layer in made))
        self.streams = HostStreams(1)
        self.copier = PageCopier([self.pool])
        self.host = torch.zeros((HOST_PAGES, self.copier.page_bytes), dtype=torch.uint8)
        self.store = SegmentStore(folder, self.copier.page_bytes, 1 << 24)
        self.woken = threading.Semaphore(0)
        self.mover = PageMover(self.streams, lambda: self.copier, self.host, self.store)
        self.mover.on_fact = self.woken.release

    def page(self, number: int) -> list[bytes]:
        return [each[number].numpy().tobytes() for pair in zip(self.pool.keys, self.pool.values, strict=True) for each in pair]

    def begin(self, kind: OperationKind, pages: list[int], host_pages: list[int], keys: list[bytes] | None = None) -> None:
        of_device, of_host = (np.array(column, dtype=np.int32) if column else NO_PAGES for column in (pages, host_pages))
        count = max(len(pages), len(host_pages))
        self.mover.begin(PageOperation(7, kind, tuple(keys or KEYS[:count]), of_device, of_host))

    def fact(self) -> Fact:
        """The next one that was asked for."""
        while True:
            assert self.woken.acquire(timeout=DEADLINE_S), "no fact comes"
            for fact in self.mover.facts():
                if fact.op_id != UNASKED:
                    return fact

    def moved(self, kind: OperationKind, pages: list[int], host_pages: list[int], keys: list[bytes] | None = None) -> Fact:
        self.begin(kind, pages, host_pages, keys)
        return self.fact()

    def close(self) -> None:
        self.mover.close()
        self.streams.close()


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    made = Moving(tmp_path / "pages")
    yield made
    made.close()


def test_a_page_comes_back_as_it_was_from_the_host_and_from_files(moving: Moving) -> None:
    before = [moving.page(number) for number in range(PAGES)]
    assert moving.moved(OperationKind.BACK_UP, [1, 4], [6, 0]).count == 2
    assert moving.moved(OperationKind.STORE, [], [6, 0]).stored == tuple(KEYS[:2])
    assert moving.moved(OperationKind.LOAD, [2, 3], [6, 0]).count == 2
    assert moving.moved(OperationKind.FETCH, [5, 0], []).count == 2
    assert [moving.page(number) for number in range(PAGES)] == [before[at] for at in (4, 1, 1, 4, 4, 1)]


def test_nothing_is_written_before_the_steps_launched_before_have_ended(moving: Moving) -> None:
    """A step that was launched still writes the page when the operation is begun; what it wrote is gone under what was read."""
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


@pytest.mark.parametrize("kind", [OperationKind.BACK_UP, OperationKind.LOAD])
def test_what_fails_moves_nothing_and_is_a_fact(moving: Moving, kind: OperationKind, caplog: pytest.LogCaptureFixture) -> None:
    before = [moving.page(number) for number in range(PAGES)]
    assert moving.moved(kind, [PAGES], [0]) == Fact(7), "there is no such page"
    assert "pages were not moved" in caplog.text
    assert [moving.page(number) for number in range(PAGES)] == before
    assert moving.moved(OperationKind.BACK_UP, [0], [0]).count == 1, "it goes on"


def test_while_memory_is_released_nothing_is_moved(moving: Moving) -> None:
    def released() -> PageCopier:
        raise AssertionError("a page is one of every layer")

    moving.mover._copier = released
    assert moving.moved(OperationKind.BACK_UP, [0], [0]).count == 0


def test_what_the_storage_has_not_is_dropped_and_what_is_before_it_comes(moving: Moving) -> None:
    moving.moved(OperationKind.BACK_UP, [0], [0])
    moving.moved(OperationKind.STORE, [], [0], KEYS[:1])
    before = moving.page(2)
    fact = moving.moved(OperationKind.FETCH, [1, 2], [], KEYS[:2])
    assert fact.count == 1 and fact.dropped == (KEYS[1],)
    assert moving.page(1) == moving.page(0) and moving.page(2) == before


def test_a_storage_that_was_emptied_has_nothing_and_takes_more(moving: Moving) -> None:
    moving.moved(OperationKind.BACK_UP, [0], [0])
    moving.moved(OperationKind.STORE, [], [0])
    moving.mover.clear_storage()
    fact = moving.moved(OperationKind.FETCH, [1], [])
    assert fact.count == 0 and fact.dropped == (KEYS[0],)
    assert moving.moved(OperationKind.STORE, [], [0]).stored == (KEYS[0],)


def test_a_slow_storage_keeps_nobody_from_the_host(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_at_the_start_it_says_what_the_files_hold(tmp_path: Path) -> None:
    first = Moving(tmp_path / "pages")
    first.moved(OperationKind.BACK_UP, [0, 1], [0, 1])
    first.moved(OperationKind.STORE, [], [0, 1])
    first.close()
    second = Moving(tmp_path / "pages")
    assert second.mover.facts() == [Fact(UNASKED, stored=tuple(KEYS[:2]))]
    second.close()
