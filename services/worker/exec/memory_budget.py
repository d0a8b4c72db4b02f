"""Computes the size of the KV pool from measured memory. All numbers are bytes."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.exec.pools.kv_pool import PoolTooSmall

PARTS = ("weights", "activation_peak", "graphs", "workspace")


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """The memory of a device and its measured parts."""

    total: int  # memory of the device
    free_now: int  # free memory that the driver reported while exactly the parts in held_now were allocated
    weights: int  # resident weights
    activation_peak: int  # activations of the largest step, above the weights
    graphs: int  # all captured graphs
    workspace: int  # buffers that are kept from step to step, such as those of attention back ends
    held_now: tuple[str, ...] = ("weights",)  # names of the allocated parts

    @property
    def own(self) -> int:
        """All parts of this worker except the pool."""
        total: int = sum(getattr(self, part) for part in PARTS)
        return total

    @property
    def _held(self) -> int:
        held: int = sum(getattr(self, part) for part in self.held_now)
        return held

    @property
    def elsewhere(self) -> int:
        """Used memory outside of the parts: other processes, the driver's context, unused memory of the allocator."""
        return max(0, self.total - self.free_now - self._held)


def kv_pool_bytes(use: DeviceMemoryUse, mem_fraction_static: float, reserve: int) -> int:
    """Returns the bytes that are left for keys and values, 0 or more.

    Args:
        mem_fraction_static: share of the device's memory that all users together may have: our parts, the pool and `elsewhere`.
        reserve: bytes that stay free in any case.
    """
    budget = min(int(use.total * mem_fraction_static), use.total - reserve)
    left = max(0, budget - use.elsewhere - use.own)
    assert left + use.own <= max(budget, use.own), "the pool takes what the others leave"
    return left


def kv_pool_pages(
    use: DeviceMemoryUse, mem_fraction_static: float, reserve: int, page_bytes: int, page_size: int, context_len: int
) -> int:
    """Returns the number of pages that fit. Raises PoolTooSmall if they hold fewer than context_len tokens."""
    left = kv_pool_bytes(use, mem_fraction_static, reserve)
    pages = left // page_bytes
    if pages * page_size >= context_len:
        return pages
    parts = describe(use, mem_fraction_static, reserve, left)
    if pages == 0:
        raise PoolTooSmall(
            f"no page of {page_size} tokens ({_mib(page_bytes)}) fits into the memory that the model leaves: {parts}"
        )
    raise PoolTooSmall(
        f"the KV pool holds {pages * page_size} tokens, fewer than context_len {context_len}: {parts}."
        f" A context_len of {pages * page_size} would fit"
    )


def describe(use: DeviceMemoryUse, mem_fraction_static: float, reserve: int, kv_bytes: int) -> str:
    """Returns one line for the log with all parts in MiB."""
    names = {"weights": "weights", "activation_peak": "activations", "graphs": "graphs", "workspace": "workspaces"}
    own = ", ".join(f"{names[part]} {_mib(getattr(use, part))}" for part in PARTS)
    limits = f"{mem_fraction_static:g} of the device's {_mib(use.total)} may be used, {_mib(reserve)} stay free"
    return f"{limits}; {own}, held elsewhere {_mib(use.elsewhere)}, KV pool {_mib(kv_bytes)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
