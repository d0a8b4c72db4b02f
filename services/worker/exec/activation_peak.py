"""Measures the peak of device memory during a piece of work, as torch's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class MemoryProbe(Protocol):
    """Counts the bytes of this process's tensors on one device."""

    def allocated(self) -> int: ...

    def peak(self) -> int:
        """Returns the largest number of allocated bytes since reset_peak()."""

    def reset_peak(self) -> None: ...

    def synchronize(self) -> None:
        """Waits for the device. Raises the error of any earlier launch."""


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


def profile_peak(run: Callable[[], None], device: torch.device, probe: MemoryProbe | None = None) -> int:
    """Calls `run` and returns the peak of allocated bytes above those allocated before; 0 on a CPU.

    Memory that `run` allocates and keeps counts. Fragments that the allocator holds in addition to tensors do not count.
    """
    memory = probe or probe_of(device)
    memory.synchronize()
    memory.reset_peak()
    before = memory.allocated()
    run()
    memory.synchronize()
    return max(0, memory.peak() - before)
