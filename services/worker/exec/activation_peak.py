"""How much device memory a piece of work takes at its height, as torch's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class MemoryProbe(Protocol):
    """Bytes of this process's tensors on one device."""

    def allocated(self) -> int: ...

    def peak(self) -> int:
        """The most that was allocated since reset_peak()."""

    def reset_peak(self) -> None: ...

    def synchronize(self) -> None:
        """Waits for the device; an error of what was launched is raised here."""


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
    """Of a device that nobody counts the memory of."""

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


def profile_peak(run: Callable[[], None], device: torch.device, probe: MemoryProbe | None = None) -> int:
    """Runs it, and gives the bytes that were allocated at the height of it above what was before; 0 on a CPU.

    What `run` allocates and keeps counts too. What the allocator holds beyond its tensors (fragments) does not.
    """
    memory = probe or probe_of(device)
    memory.synchronize()
    memory.reset_peak()
    before = memory.allocated()
    run()
    memory.synchronize()
    return max(0, memory.peak() - before)
