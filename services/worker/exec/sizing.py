"""Measures the number of KV pages that fit into a GPU: it runs the largest step and captures graphs with a pool of one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.worker.exec.activation_peak import profile_peak
from services.worker.exec.memory_budget import DeviceMemoryUse, describe, kv_pool_bytes, kv_pool_pages
from services.worker.exec.pools import kv_pool
from services.worker.exec.pools.kv_pool import LayerKV
from services.worker.exec.step.model_runner import DeviceRunner
from services.worker.exec.streams.returned_memory import return_memory

RESERVE = 512 << 20  # bytes of the device that stay free, because libraries allocate some at any time


@dataclass(frozen=True, slots=True)
class PoolNeeds:
    """The sizes of one executor on which the size of its pool depends."""

    layers: Sequence[LayerKV]  # layers of the model and of the drafter
    dtype: torch.dtype
    page_size: int  # tokens
    context_len: int  # tokens that the pool must hold
    weight_bytes: int  # resident weights
    fixed_bytes: int  # buffers that are kept from step to step

    @property
    def page_bytes(self) -> int:
        return kv_pool.bytes_per_token(self.layers, self.dtype) * self.page_size


def pages_of_device(
    runner: DeviceRunner,
    needs: PoolNeeds,
    mem_fraction_static: float,
    largest: Callable[[], None],
    graph_bytes: Callable[[], int],
    progress: Callable[[str], None],
) -> int:
    """Measures the number of pages for the pool. The runner must have a pool of one page.

    Args:
        mem_fraction_static: share of the device's memory that may be used.
        largest: runs the largest step.
        graph_bytes: returns the memory of all graphs.
        progress: receives a line with all parts of the memory.

    Raises:
        PoolTooSmall: the pool would hold fewer than context_len tokens.
    """
    device = runner.streams.device
    assert needs.page_bytes > 0, "a page takes memory"
    peak = profile_peak(largest, device)
    return_memory(device)
    graphs = graph_bytes()
    return_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    use = DeviceMemoryUse(
        total=total,
        free_now=free,
        weights=needs.weight_bytes,
        activation_peak=peak,
        graphs=graphs,
        workspace=needs.fixed_bytes,
        held_now=("weights", "workspace"),
    )
    pages = kv_pool_pages(use, mem_fraction_static, RESERVE, needs.page_bytes, needs.page_size, needs.context_len)
    progress(f"memory: {describe(use, mem_fraction_static, RESERVE, kv_pool_bytes(use, mem_fraction_static, RESERVE))}")
    return pages
