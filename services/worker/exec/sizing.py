"""Computes the sizes of pools that fit into a GPU's memory.

With the smallest pools, the largest step is run and graphs are captured, and their memory is measured. The pools get the memory
that these parts, the weights and other processes leave. Numbers without another unit are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from rootstock_llm.services.worker.core.contracts.pool_sizes import CacheShape, PoolSizes, PoolTooSmall
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner
from rootstock_llm.services.worker.exec.streams.returned_memory import return_memory

RESERVE = 512 << 20  # bytes of the device that stay free, because libraries allocate memory at any time
PARTS = ("weights", "activation_peak", "graphs", "workspace")


def measured_use(
    runner: DeviceRunner, weight_bytes: int, pool_bytes: int, largest: Callable[[], None], graph_bytes: Callable[[], int]
) -> DeviceMemoryUse:
    """Measures the parts of the device's memory. The runner must have the smallest pools.

    Args:
        weight_bytes: bytes of all weights.
        pool_bytes: bytes of the present pools, which count as free.
        largest: runs the largest step.
        graph_bytes: returns the bytes of all graphs; it may capture some of them.
    """
    device = runner.streams.device
    workspace = torch.cuda.memory_allocated(device) - weight_bytes - pool_bytes
    peak = profile_peak(largest, device)
    return_memory(device)
    graphs = graph_bytes()
    return_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemoryUse(
        total=total,
        free_now=free + pool_bytes,
        weights=weight_bytes,
        activation_peak=peak,
        graphs=graphs,
        workspace=workspace,
        allocated_now=("weights", "workspace"),
    )


def estimated_graph_bytes(capture: Callable[[Callable[[], None]], None], num_graphs: int, free: Callable[[], int]) -> int:
    """Estimates the bytes of all graphs from those of the two largest.

    The graphs share their temporary tensors. Each further graph is assumed to need as many bytes as the second one.

    The two graphs are captured twice, and only the second capture is measured. During the first capture, libraries load kernels
    and back ends allocate workspaces. This memory stays allocated, so it is part of DeviceMemoryUse.used_elsewhere.

    Args:
        capture: captures the two largest graphs, the largest first, calls its argument after each of them, and releases both. If
            there is only one graph, or if capturing fails, it captures fewer.
        num_graphs: number of all graphs, 1 or more.
        free: returns the free bytes of the device.
    """
    capture(lambda: None)
    readings = [free()]
    capture(lambda: readings.append(free()))
    taken = [max(0, before - after) for before, after in pairwise(readings)]
    return sum(taken[:1]) + sum(taken[1:]) * (num_graphs - 1)


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """The memory of a device and its measured parts."""

    total: int  # memory of the device
    free_now: int  # free memory that the driver reported, and the memory of the present pools
    weights: int  # resident weights
    activation_peak: int  # memory that the largest step needs in addition to the weights
    graphs: int  # all captured graphs
    workspace: int  # buffers that stay allocated from step to step, such as those of attention back ends
    allocated_now: tuple[str, ...] = ("weights",)  # names of the parts that were allocated when free_now was read

    @property
    def own(self) -> int:
        """Memory of all parts of this worker except the pools."""
        total: int = sum(getattr(self, part) for part in PARTS)
        return total

    @property
    def _allocated(self) -> int:
        allocated: int = sum(getattr(self, part) for part in self.allocated_now)
        return allocated

    @property
    def used_elsewhere(self) -> int:
        """Used memory that belongs to no part: other processes, the driver's context, cached memory of torch's allocator."""
        return max(0, self.total - self.free_now - self._allocated)


def pool_bytes(use: DeviceMemoryUse, mem_fraction_static: float, reserve: int = RESERVE) -> int:
    """Returns the bytes of a GPU's memory that are left for the pools, 0 or more.

    Args:
        mem_fraction_static: share of the device's memory for the worker's parts, the pools and used_elsewhere together.
        reserve: bytes that stay free in any case.
    """
    budget = min(int(use.total * mem_fraction_static), use.total - reserve)
    left = max(0, budget - use.used_elsewhere - use.own)
    assert left + use.own <= max(budget, use.own), "the pools and the parts do not exceed the budget"
    return left


def fitting_sizes(
    use: DeviceMemoryUse, mem_fraction_static: float, caches: CacheShape, page_size: int, context_len: int, reserve: int = RESERVE
) -> PoolSizes:
    """Returns the sizes of the largest pools that fit.

    Args:
        page_size: tokens of a page.
        context_len: tokens that the pages must hold.

    Raises:
        PoolTooSmall: the pages would hold fewer than context_len tokens, or the units of one request do not fit.
    """
    left = pool_bytes(use, mem_fraction_static, reserve)
    parts = describe(use, mem_fraction_static, left, reserve)
    try:
        sizes = caches.split(left)
    except PoolTooSmall as error:
        raise PoolTooSmall(f"{error}: {parts}") from None
    tokens = sizes.pages * page_size
    if tokens >= context_len:
        return sizes
    if tokens == 0:
        page = f"no KV page of {page_size} tokens ({_mib(caches.page_bytes)})"
        raise PoolTooSmall(f"{page} fits into the memory that is left after the model: {parts}")
    raise PoolTooSmall(
        f"the KV pool holds {tokens} tokens, fewer than context_len {context_len}: {parts}. Set context_len to {tokens} or less"
    )


def describe(use: DeviceMemoryUse, mem_fraction_static: float, left: int, reserve: int = RESERVE) -> str:
    """Returns a line for the log with the memory of all parts in MiB.

    Args:
        left: bytes of the pools.
    """
    names = {"weights": "weights", "activation_peak": "activations", "graphs": "graphs", "workspace": "workspaces"}
    own = ", ".join(f"{names[part]} {_mib(getattr(use, part))}" for part in PARTS)
    limits = f"{mem_fraction_static:g} of the device's {_mib(use.total)} may be used, {_mib(reserve)} stay free"
    return f"{limits}; {own}, used elsewhere {_mib(use.used_elsewhere)}, KV pool {_mib(left)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


def profile_peak(run: Callable[[], None], device: torch.device, probe: MemoryProbe | None = None) -> int:
    """Calls `run` and returns the peak of allocated bytes above those allocated before; 0 on a CPU.

    Memory that `run` allocates and does not free also counts. Cached memory of the allocator, which has no tensor, does not
    count.
    """
    memory = probe or probe_of(device)
    memory.synchronize()
    memory.reset_peak()
    before = memory.allocated()
    run()
    memory.synchronize()
    return max(0, memory.peak() - before)


class MemoryProbe(Protocol):
    """Counts the bytes of this process's tensors on one device."""

    def allocated(self) -> int: ...

    def peak(self) -> int:
        """Returns the largest number of allocated bytes since reset_peak()."""

    def reset_peak(self) -> None: ...

    def synchronize(self) -> None:
        """Waits for the device. Raises the error of an earlier launch that has failed."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class NoMemory:
    """A probe for devices whose memory is not counted, such as a CPU."""

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def probe_of(device: torch.device) -> MemoryProbe:
    return CudaMemory(device) if device.type == "cuda" else NoMemory()
