"""Paged key/value memory, the page table that maps slots into it, and how much of it fits this machine.

KVPool and PageTable are written by the executor's forward thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.ops import Kernels
from services.worker.core.contracts.plan import I32, BatchPlan
from services.worker.exec.weights.families import DecoderConfig


class PoolTooSmall(ValueError):
    """The memory left does not hold even one sequence's page."""


@dataclass(frozen=True, slots=True)
class KVPool:
    """keys, values: per layer, [pages, kv heads, page size, head_dim] in the model dtype. Every page id is usable."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, config: DecoderConfig, num_pages: int, page_size: int, dtype: torch.dtype, kernels: Kernels) -> KVPool:
        shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
        pools = [kernels.allocate_pool(shape, dtype) for _ in range(2 * config.num_layers)]
        return cls(tuple(pools[0::2]), tuple(pools[1::2]))


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Over all layers, keys and values."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize


def kv_pool_tokens(free_bytes: int, mem_fraction_static: float, bytes_per_token: int) -> int:
    """Tokens that fit into mem_fraction_static of free_bytes, which is what is left after the weights."""
    return max(0, int(free_bytes * mem_fraction_static)) // bytes_per_token


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # absent, unreadable, or the word "max"
        return None


def _reclaimable(stat: Path, key: str) -> int:
    """Page cache that the kernel gives up before it kills: counted as used by the cgroup, free for us."""
    try:
        fields = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines() if " " in line)
        return int(fields.get(key, 0))
    except (OSError, ValueError):
        return 0


def _cgroup_free(root: Path, group: str, limit: str, usage: str, cache_key: str) -> list[int]:
    """Bytes left under each limit on the way from a group up to the hierarchy's root."""
    left, folder = [], root / group.strip("/")
    for place in (folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)):
        cap, used = _read_int(place / limit), _read_int(place / usage)
        if cap is not None and used is not None:
            left.append(cap - used + _reclaimable(place / "memory.stat", cache_key))
    return left


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: MemAvailable, or less under a cgroup limit (v1 or v2)."""
    lines = (proc / "meminfo").read_text().splitlines()
    left = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))]
    try:
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, group in groups:
        if controllers == "":
            left += _cgroup_free(cgroups, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            left += _cgroup_free(
                cgroups / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return max(0, min(left))


class PageTable:
    """int32[slots, pages]: page ids of each slot's sequence; -1 where no plan has named one."""

    def __init__(self, max_slots: int, max_pages: int, page_size: int) -> None:
        self._table: I32 = np.full((max_slots, max_pages), -1, dtype=np.int32)
        self.page_size = page_size
        self.tensor = torch.from_numpy(self._table)

    @property
    def capacity(self) -> int:
        """Tokens that a slot's row can map."""
        return int(self._table.shape[1]) * self.page_size

    def update(self, plan: BatchPlan) -> None:
        """Applies the plan's additions in order."""
        counts = plan.table_counts
        before = np.cumsum(counts) - counts
        columns = np.repeat(plan.table_firsts - before, counts) + np.arange(len(plan.table_pages))
        self._table[np.repeat(plan.table_slots, counts), columns] = plan.table_pages

    def locations(self, slots: I32, positions: I32) -> NDArray[np.int64]:
        """Place in the pool of each (slot, position), as page * page_size + offset; negative where no page is named."""
        pages = self._table[slots, positions // self.page_size].astype(np.int64)
        return np.where(pages < 0, -1, pages * self.page_size + positions % self.page_size)
