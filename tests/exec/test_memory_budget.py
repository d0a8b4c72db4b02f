"""The memory budget of the KV pool, and the messages if the pool is too small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from rootstock_llm.services.worker.core.contracts.pool_sizes import CacheShape, PoolSizes, PoolTooSmall
from rootstock_llm.services.worker.exec.sizing import (
    DeviceMemoryUse,
    describe,
    estimated_graph_bytes,
    fitting_sizes,
    pool_bytes,
    profile_peak,
)

MIB = 1 << 20
ALONE = DeviceMemoryUse(
    total=1000 * MIB, free_now=690 * MIB, weights=300 * MIB, activation_peak=50 * MIB, graphs=20 * MIB, workspace=30 * MIB
)


@dataclass(frozen=True)
class Case:
    """The memory of a device and the settings, with the expected size of the KV pool."""

    use: DeviceMemoryUse
    fraction: float  # mem_fraction_static
    reserve: int  # bytes that stay free
    expected_mib: int  # expected size of the KV pool in MiB


CASES = {
    "all parts and 10 MiB of the driver": Case(ALONE, 0.9, 0, 900 - 300 - 50 - 20 - 30 - 10),
    "memory of other processes": Case(replace(ALONE, free_now=490 * MIB), 0.9, 0, 900 - 400 - 210),
    "parts that are already allocated": Case(
        replace(ALONE, free_now=640 * MIB, allocated_now=("weights", "graphs", "workspace")), 0.9, 0, 900 - 400 - 10
    ),
    "nothing allocated yet": Case(replace(ALONE, free_now=990 * MIB, allocated_now=()), 0.9, 0, 900 - 400 - 10),
    "reserve below the unused fraction": Case(ALONE, 0.9, 60 * MIB, 490),
    "reserve above the unused fraction": Case(ALONE, 0.9, 200 * MIB, 390),
    "the whole device": Case(ALONE, 1.0, 0, 590),
    "no memory left": Case(ALONE, 0.2, 0, 0),
    "more free memory than expected": Case(replace(ALONE, free_now=800 * MIB), 0.9, 0, 500),
}


@pytest.mark.by_day(one_in=2, seed=3)
@pytest.mark.parametrize("name", CASES)
def test_kv_pool_gets_the_memory_that_all_other_parts_leave(name: str) -> None:
    case = CASES[name]
    assert pool_bytes(case.use, case.fraction, case.reserve) == case.expected_mib * MIB


def of_pages(mib: int) -> CacheShape:
    """Returns the shape of a model whose KV is in pages of `mib` MiB."""
    return CacheShape(page_bytes=mib * MIB)


@pytest.mark.by_day(one_in=2, seed=7)
@pytest.mark.parametrize(("page_mib", "context_len", "pages"), [(1, 100, 490), (489, 16, 1), (100, 64, 4), (490, 1, 1)])
def test_size_of_the_kv_pool_is_rounded_down_to_whole_pages(page_mib: int, context_len: int, pages: int) -> None:
    assert fitting_sizes(ALONE, 0.9, of_pages(page_mib), 16, context_len, 0) == PoolSizes(pages)


def test_error_is_raised_when_no_kv_page_fits_into_memory() -> None:
    with pytest.raises(PoolTooSmall) as caught:
        fitting_sizes(ALONE, 0.9, of_pages(491), 16, 1, 0)
    sentence = str(caught.value)
    assert sentence.startswith("no KV page of 16 tokens (491 MiB) fits into the memory that is left after the model")
    for part in ("weights 300 MiB", "activations 50 MiB", "graphs 20 MiB", "workspaces 30 MiB", "used elsewhere 10 MiB"):
        assert part in sentence
    assert "0.9 of the device's 1000 MiB" in sentence and "KV pool 490 MiB" in sentence


def test_error_is_raised_when_the_context_does_not_fit_into_the_kv_pool() -> None:
    assert fitting_sizes(ALONE, 0.9, of_pages(100), 16, 64, 0) == PoolSizes(4)
    with pytest.raises(PoolTooSmall, match=r"holds 64 tokens, fewer than context_len 65: .*Set context_len to 64 or less"):
        fitting_sizes(ALONE, 0.9, of_pages(100), 16, 65, 0)


HYBRID = CacheShape(page_bytes=MIB, state_bytes=20 * MIB, scratch_states=2, max_slots=8, mamba_full_memory_ratio=1.0)


def test_memory_is_divided_between_pages_and_states() -> None:
    found = fitting_sizes(ALONE, 0.9, HYBRID, 16, 16, 0)
    assert found == PoolSizes(225, 0, 11)  # scratch states take 40 of the 490 MiB
    assert HYBRID.bytes_of(found) <= 490 * MIB


def test_context_is_checked_after_the_states_are_subtracted_from_the_memory() -> None:
    """The memory has 490 pages without states, and 225 pages (3,600 tokens) with states."""
    with pytest.raises(PoolTooSmall, match=r"the KV pool holds 3600 tokens, fewer than context_len 3601: 0.9 of the device's"):
        fitting_sizes(ALONE, 0.9, HYBRID, 16, 3601, 0)


def test_error_is_raised_when_the_configured_states_do_not_fit_into_memory() -> None:
    given = replace(HYBRID, max_mamba_cache_size=23)
    text = r"23 states of max_mamba_cache_size and 2 of the worker's own, 20.0 MiB each, do not fit into 490.0 MiB: 0.9 of the"
    with pytest.raises(PoolTooSmall, match=text):
        fitting_sizes(ALONE, 0.9, given, 16, 16, 0)
    assert fitting_sizes(ALONE, 0.9, replace(given, max_mamba_cache_size=22), 16, 16, 0) == PoolSizes(10, 0, 22)


def test_description_of_the_memory_budget_lists_all_parts() -> None:
    assert describe(ALONE, 0.85, 5 * MIB, 40 * MIB) == (
        "0.85 of the device's 1000 MiB may be used, 40 MiB stay free; weights 300 MiB, activations 50 MiB, graphs 20 MiB,"
        " workspaces 30 MiB, used elsewhere 10 MiB, KV pool 5 MiB"
    )


class GraphDevice:
    """A device on which graphs are captured. The first capture also loads kernels, which stay loaded."""

    def __init__(self, graphs: Sequence[int], kernels: int = 0) -> None:
        """
        Args:
            graphs: bytes of the graphs that a capture makes, the largest first.
            kernels: bytes of the loaded kernels.
        """
        self.free = 10_000 * MIB
        self._graphs, self._kernels = graphs, kernels

    def capture(self, report: Callable[[], None]) -> None:
        before = self.free - self._kernels
        self.free, self._kernels = before, 0
        for size in self._graphs:
            self.free -= size
            report()
        self.free = before


@pytest.mark.parametrize("kernels_mib", [0, 5, 100])
def test_memory_of_graphs_is_the_largest_graph_and_one_of_the_second_size_for_each_other_graph(kernels_mib: int) -> None:
    device = GraphDevice((50 * MIB, 10 * MIB), kernels_mib * MIB)
    assert estimated_graph_bytes(device.capture, 30, lambda: device.free) == (50 + 29 * 10) * MIB
    assert device.free == (10_000 - kernels_mib) * MIB


def test_memory_of_one_graph_is_its_own_memory_and_that_of_no_graph_is_zero() -> None:
    one, none = GraphDevice((50 * MIB,), 100 * MIB), GraphDevice(())
    assert estimated_graph_bytes(one.capture, 1, lambda: one.free) == 50 * MIB
    assert estimated_graph_bytes(none.capture, 4, lambda: none.free) == 0


class Counted:
    """An allocator that only counts bytes."""

    def __init__(self) -> None:
        self.held = 100
        self.most = 5000  # largest allocation so far, from work before the test
        self.calls: list[str] = []

    def take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.most = max(self.most, self.held)

    def allocated(self) -> int:
        return self.held

    def peak(self) -> int:
        self.calls.append("peak")
        return self.most

    def reset_peak(self) -> None:
        self.calls.append("reset")
        self.most = self.held

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_measured_peak_is_the_peak_above_the_existing_memory() -> None:
    memory = Counted()

    def run() -> None:
        memory.calls.append("run")
        memory.take(70)
        memory.take(-70)
        memory.take(30)

    assert profile_peak(run, torch.device("cpu"), memory) == 70
    assert memory.calls == ["synchronize", "reset", "run", "synchronize", "peak"]


def test_measured_peak_is_zero_without_allocations_and_on_a_cpu() -> None:
    assert profile_peak(lambda: None, torch.device("cpu"), Counted()) == 0
    ran: list[int] = []
    assert profile_peak(lambda: ran.append(1), torch.device("cpu")) == 0
    assert ran == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts a GPU's memory")
def test_memory_peak_is_measured_on_a_gpu() -> None:
    device = torch.device("cuda")

    def run() -> None:
        first = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
        del first
        torch.empty(8 * MIB, dtype=torch.uint8, device=device)

    assert profile_peak(run, device) == 32 * MIB
