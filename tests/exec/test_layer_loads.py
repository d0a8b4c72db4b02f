"""Loads of pages layer by layer: the early report, and the waits of steps and operations for the loaded layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from rootstock_llm.services.worker.core.contracts.transfers import NO_PAGES, UNASKED, Fact, OperationKind, PageOperation
from rootstock_llm.services.worker.core.tiers.page_keys import KEY_BYTES
from rootstock_llm.services.worker.exec.kernel_set import copies
from rootstock_llm.services.worker.exec.pools import kv_pool
from rootstock_llm.services.worker.exec.pools.kv_pool import MOST_GROUPS, Arrivals, KVPool, LayerGroups, LayerLoads
from rootstock_llm.services.worker.exec.streams.cuda_streams import LoadFailed
from rootstock_llm.services.worker.exec.streams.host_streams import HostArrival, HostStreams
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier, PoolReader
from rootstock_llm.services.worker.exec.tiers.page_mover import PageMover

PAGES, HOST_PAGES, LAYERS, DEADLINE_S = 6, 4, 3, 20.0
KEYS = tuple(bytes([number]) * KEY_BYTES for number in range(HOST_PAGES))
ONE, OTHER = np.array([2], dtype=np.int32), np.array([3], dtype=np.int32)
SOON = 1e18  # a rate of the last load, in bytes per second, with which the next load is reported immediately


class Gated(PageCopier):
    """A copier that loads a group of layers only after the test has released the semaphore `may`."""

    def __init__(self, pools: list[KVPool]) -> None:
        super().__init__(pools, copies("auto", torch.device("cpu")))
        self.may = threading.Semaphore(0)
        self.error: Exception | None = None

    def group_loader(self, memory: Any, rows: Any, pages: Any) -> Callable[[int], None]:
        bring = super().group_loader(memory, rows, pages)

        def gated(group: int) -> None:
            assert self.may.acquire(timeout=DEADLINE_S), f"the test did not release the next group within {DEADLINE_S:.0f} s"
            if self.error is not None:
                raise self.error
            bring(group)

        return gated


class Loading:
    """A KV pool of three layers and its page mover. Rows in host memory have ones, pages of the pool have zeros."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        tensors = [[torch.zeros(PAGES, 1, 4, 8) for _ in range(LAYERS)] for _ in range(2)]
        self.pool = KVPool(tuple(tensors[0]), tuple(tensors[1]), self.arrivals)
        self.copier, self.streams = Gated([self.pool]), HostStreams(1)
        self.host = torch.ones(HOST_PAGES, self.copier.page_bytes, dtype=torch.uint8)
        self.facts = threading.Semaphore(0)
        self.lost: list[str] = []
        self._facts: list[Fact] = []
        self.mover = PageMover(self.streams, lambda: self.copier, self.arrivals, self.host, None)
        self.mover.on_fact, self.mover.on_lost = self.facts.release, self.lost.append
        self.mover._loads._bytes_s = SOON

    def begin(self, kind: OperationKind = OperationKind.LOAD, pages: Any = ONE, host_pages: Any = OTHER) -> None:
        self.mover.begin(PageOperation(7, kind, KEYS[: len(pages)], pages, host_pages))

    def fact(self) -> Fact:
        assert self.facts.acquire(timeout=DEADLINE_S), f"the mover reported no fact within {DEADLINE_S:.0f} s"
        self._facts += self.mover.facts()
        return self._facts.pop(0)

    def moved_beside(self) -> Fact:
        """Backs up another page and returns the fact that reports it."""
        self.begin(OperationKind.BACK_UP, OTHER, np.array([1], dtype=np.int32))
        return self.fact()

    def bring(self, groups: int = 1) -> None:
        self.copier.may.release(groups)

    def step(self, pages: Any) -> tuple[list[int], threading.Thread]:
        """Starts a thread that reads the layers, like a step that adds `pages` to page tables.

        Returns:
            List to which the thread adds the values that it reads, and the thread.
        """
        found: list[int] = []

        def layers() -> None:
            self.arrivals.expect(pages)
            for number in range(LAYERS):
                keys, values = self.pool.layer(number)
                assert keys[2].equal(values[2])
                found.append(int(keys[2].view(torch.uint8)[0, 0, 0]))
            self.arrivals.wait_all()

        thread = threading.Thread(target=layers)
        thread.start()
        return found, thread

    def close(self) -> None:
        self.bring(100)
        self.mover.close()
        self.streams.close()


@pytest.fixture
def loading() -> Iterator[Loading]:
    made = Loading()
    yield made
    made.close()


def raised(work: Callable[[], object]) -> Exception | None:
    """Runs `work` on a thread of its own, because it may hang. Returns the exception that `work` raises, or None."""
    errors: list[Exception | None] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # the test checks the type of the exception
            errors.append(error)
        else:
            errors.append(None)

    threading.Thread(target=run, daemon=True).start()
    until(lambda: bool(errors))
    return errors[0]


def _has(found: list[int], count: int) -> bool:
    return len(found) >= count


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.001)


def test_step_reads_each_layer_directly_after_the_load_of_the_layer(loading: Loading) -> None:
    loading.begin()
    assert loading.fact() == Fact(7, 1, early=True), (
        "the early fact must come before any group is loaded, and without the time of the load"
    )
    found, step = loading.step(ONE)
    for layer in range(LAYERS):
        time.sleep(0.02)
        assert found == [1] * layer
        loading.bring()
        until(partial(_has, found, layer + 1))
    step.join(DEADLINE_S)
    assert not step.is_alive() and found == [1] * LAYERS
    fact = loading.fact()
    assert fact.op_id == UNASKED and fact.loaded is not None and fact.loaded[0] == 1 and fact.loaded[1] > 0.05


def test_step_that_reads_other_pages_does_not_wait_for_the_load(loading: Loading) -> None:
    loading.begin()
    loading.fact()
    found, step = loading.step(OTHER)
    step.join(DEADLINE_S)
    assert found == [0] * LAYERS, "the load must not write another page"
    found, step = loading.step(NO_PAGES)
    step.join(DEADLINE_S)
    assert found == [0] * LAYERS
    loading.bring(LAYERS)


def test_first_step_with_each_loaded_page_waits_for_the_load(loading: Loading) -> None:
    """A step that fails before its launch must not change the waits of later steps with pages of the same load."""
    two = np.array([2, 4], dtype=np.int32)
    loading.begin(pages=two, host_pages=np.array([0, 1], dtype=np.int32))
    loading.fact()
    loading.arrivals.expect(ONE)  # this step fails before its launch
    loading.bring(LAYERS - 1)
    found, step = loading.step(np.array([4], dtype=np.int32))
    until(lambda: len(found) == LAYERS - 1)
    time.sleep(0.02)
    assert len(found) == LAYERS - 1
    loading.bring()
    step.join(DEADLINE_S)
    found, step = loading.step(ONE)
    step.join(DEADLINE_S)
    assert found == [1] * LAYERS


def test_backup_does_not_wait_for_an_unreported_load(loading: Loading) -> None:
    loading.mover._loads._bytes_s = 0.0
    loading.begin()
    assert loading.moved_beside() == Fact(7, 1, seconds=ANY)
    loading.bring(LAYERS)


@pytest.mark.parametrize("kind", [OperationKind.BACK_UP, OperationKind.LOAD])
def test_operation_waits_for_a_reported_load(loading: Loading, kind: OperationKind) -> None:
    """Without a wait, a backup could overwrite a host row that the load still reads, or copy a page before it is loaded."""
    loading.begin(host_pages=np.array([0], dtype=np.int32))
    loading.fact()
    loading.begin(kind, ONE, np.array([1], dtype=np.int32))
    time.sleep(0.05)
    assert not loading.mover.facts()
    loading.host[1] = 5
    loading.bring(2 * LAYERS)
    facts = [loading.fact() for _ in range(2)]
    assert {fact.op_id for fact in facts} == {7, UNASKED}
    if kind is OperationKind.BACK_UP:
        assert loading.host[1].eq(1).all()
    else:
        until(lambda: bool(loading.pool.values[LAYERS - 1][2].view(torch.uint8).eq(5).all()))


def test_pool_reader_waits_for_a_reported_load(loading: Loading) -> None:
    loading.begin()
    loading.fact()
    out = bytearray(loading.copier.page_bytes)
    read = PoolReader(loading.streams, lambda: loading.copier, loading.arrivals)
    reader = threading.Thread(target=read, args=(ONE, memoryview(out)))
    reader.start()
    time.sleep(0.05)
    assert reader.is_alive() and set(out) == {0}
    loading.bring(LAYERS)
    reader.join(DEADLINE_S)
    assert set(out) == {1}


def test_load_is_reported_when_the_remaining_time_is_less_than_early_s(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of the last large load predicts the remaining time. Without a rate, the load is reported after its last group."""
    monkeypatch.setattr(kv_pool, "EARLY_S", 1.0)
    loading.mover._loads._bytes_s = 0.0
    loading.begin()
    loading.bring(LAYERS)
    first = loading.fact()
    assert first.op_id == 7 and first.count == 1 and first.seconds > 0 and not first.early and first.loaded is None
    assert not loading.mover._loads._bytes_s, "a load of one page does not change the rate"
    monkeypatch.setattr(kv_pool, "MIN_RATED_BYTES", loading.copier.page_bytes)
    loading.mover._loads._bytes_s = loading.copier.page_bytes / LAYERS  # a layer each second
    loading.begin()
    loading.bring(LAYERS - 2)
    time.sleep(0.05)
    assert not loading.mover.facts()
    loading.bring()
    assert loading.fact() == Fact(7, 1, early=True)
    loading.bring()
    assert loading.fact().loaded is not None
    assert loading.mover._loads._bytes_s != loading.copier.page_bytes / LAYERS, (
        "a load of MIN_RATED_BYTES or more changes the rate"
    )


class TestFailures:
    def test_failed_load_moves_no_page_when_the_load_was_not_reported(self, loading: Loading) -> None:
        loading.mover._loads._bytes_s = 0.0
        loading.copier.error = MemoryError("made to fail")
        loading.begin()
        loading.bring()
        assert loading.fact() == Fact(7) and not loading.lost
        found, step = loading.step(ONE)
        step.join(DEADLINE_S)
        assert found == [0] * LAYERS, "the step must not wait for the failed load"

    def test_failed_load_counts_as_a_lost_device_when_the_load_was_reported(self, loading: Loading) -> None:
        loading.begin()
        assert loading.fact().count == 1
        loading.copier.error = MemoryError("made to fail")
        loading.bring()
        until(lambda: bool(loading.lost))
        assert "made to fail" in loading.lost[0]
        loading.arrivals.expect(ONE)
        for wait in (partial(loading.pool.layer, 0), partial(loading.pool.layer, 0), loading.arrivals.settle):
            assert isinstance(raised(wait), LoadFailed)


class TestOnADevice:
    """Tests with a device, on whose stream all groups of a load are queued before the load is reported."""

    class Streams(HostStreams):
        on_host = False

        def arrival(self, groups: int) -> HostArrival:
            return Recorded(groups)

    def test_all_layer_groups_are_queued_before_the_load_is_reported(self) -> None:
        streams, arrivals, brought = self.Streams(1), Arrivals(), list[int]()
        loads = LayerLoads(streams, arrivals)
        loads._bytes_s = SOON
        calls: list[tuple[int, ...]] = []

        def tell() -> None:
            arrivals.expect(ONE)
            calls.append(tuple(brought))
            arrivals.wait(2)

        groups = LayerGroups.for_pools([LAYERS])
        seconds, reported = loads.load(brought.append, ONE, groups, 100, tell)
        assert reported and calls == [(0, 1, 2)] and seconds >= 0
        streams.close()


class Recorded(HostArrival):
    """An arrival that checks its waits. On a device, a wait for a group that is not queued yet would return too early."""

    def wait(self, group: int) -> None:
        assert self._complete > group, "the group's event was recorded before the wait"


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("layers", [(1, 0), (3, 2), (80, 0), (28, 1)], ids=str)
def test_each_layer_is_in_one_group_and_the_draft_model_comes_first(layers: tuple[int, int]) -> None:
    groups = LayerGroups.for_pools(layers)
    assert sorted(layer for group in groups.layers for layer in group) == list(range(sum(layers)))
    assert len(groups.layers) == min(MOST_GROUPS, sum(layers)) and all(groups.layers)
    assert all(layer in groups.layers[group] for layer, group in enumerate(groups.of))
    order = [groups.of[layer] for layer in (*range(layers[0], sum(layers)), *range(layers[0]))]
    assert order == sorted(order)
