"""How much of a device the KV pool may take: arithmetic over measured numbers, all in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.exec.pools.kv_pool import PoolTooSmall

PARTS = ("weights", "activation_peak", "graphs", "workspace")


@dataclass(frozen=True, slots=True)
class DeviceMemoryUse:
    """total: the device's. free_now: what the driver gave as free while the parts named in held_now, and no others, were held.

    weights: resident. activation_peak: above them, of the largest step. graphs: of all captured ones. workspace: buffers kept
    from step to step, of attention back ends and others.
    """

    total: int
    free_now: int
    weights: int
    activation_peak: int
    graphs: int
    workspace: int
    held_now: tuple[str, ...] = ("weights",)

    @property
    def own(self) -> int:
        """All of ours but the pool."""
        total: int = sum(getattr(self, part) for part in PARTS)
        return total

    @property
    def _held(self) -> int:
        held: int = sum(getattr(self, part) for part in self.held_now)
        return held

    @property
    def elsewhere(self) -> int:
        """In use and none of the parts: other processes, the driver's context, what the allocator holds and does not use."""
        return max(0, self.total - self.free_now - self._held)


def kv_pool_bytes(use: DeviceMemoryUse, mem_fraction_static: float, reserve: int) -> int:
    """What is left for keys and values, 0 or more.

    mem_fraction_static: the share of the whole device that everything on it may come to: our parts, the pool, and what is
    held elsewhere. reserve: bytes that stay free in any case.
    """
    budget = min(int(use.total * mem_fraction_static), use.total - reserve)
    left = max(0, budget - use.elsewhere - use.own)
    assert left + use.own <= max(budget, use.own), "the pool takes what the others leave"
    return left


def kv_pool_pages(
    use: DeviceMemoryUse, mem_fraction_static: float, reserve: int, page_bytes: int, page_size: int, context_len: int
) -> int:
    """Pages of page_size tokens and page_bytes that fit. Raises PoolTooSmall if they do not hold context_len tokens."""
    left = kv_pool_bytes(use, mem_fraction_static, reserve)
    pages = left // page_bytes
    if pages * page_size >= context_len:
        return pages
    parts = describe(use, mem_fraction_static, reserve, left)
    if pages == 0:
        raise PoolTooSmall(f"no page of {page_size} tokens ({_mib(page_bytes)}) fits beside the model: {parts}")
    raise PoolTooSmall(
        f"the KV pool holds {pages * page_size} tokens, fewer than context_len {context_len}: {parts}."
        f" A context_len of {pages * page_size} would fit"
    )


def describe(use: DeviceMemoryUse, mem_fraction_static: float, reserve: int, kv_bytes: int) -> str:
    """One line for the log, in MiB."""
    names = {"weights": "weights", "activation_peak": "activations", "graphs": "graphs", "workspace": "workspaces"}
    own = ", ".join(f"{names[part]} {_mib(getattr(use, part))}" for part in PARTS)
    limits = f"{mem_fraction_static:g} of the device's {_mib(use.total)} may be used, {_mib(reserve)} stay free"
    return f"{limits}; {own}, held elsewhere {_mib(use.elsewhere)}, KV pool {_mib(kv_bytes)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
