"""Bounded host memory between files and a device: each reader thread fills one buffer while the device empties the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

BUFFERS = 2  # a thread's
ALIGNMENT = 8  # bytes; of the widest element


class PinnedSlab:
    """Memory that the device copies from by itself; on a CPU, memory like any other. Whoever made it calls release()."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)

    def release(self) -> None:
        """Back to the system, past torch's cache of pinned memory. No copy is under way."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        # public since torch 2.12; the builds with CUDA had it by the other name before
        empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
        if self._on_cuda and empty is not None:
            empty()


def buffers_of(slab: Tensor, threads: int) -> list[list[Tensor]]:
    """BUFFERS for each thread, of equal size."""
    size = len(slab) // (threads * BUFFERS) // ALIGNMENT * ALIGNMENT
    if size == 0:
        raise ValueError(f"{len(slab)} bytes of staging are too few for {threads} threads")
    assert size * threads * BUFFERS <= len(slab), "all buffers lie in the slab"
    buffers = [slab[index * size : (index + 1) * size] for index in range(threads * BUFFERS)]
    return [buffers[first : first + BUFFERS] for first in range(0, len(buffers), BUFFERS)]


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self, stream: torch.cuda.Stream | None) -> None: ...

    def synchronize(self) -> None:
        """Returns at once where nothing was recorded."""


class Immediate:
    """The Event of a device whose copies are done when they have been started."""

    def record(self, stream: torch.cuda.Stream | None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def event_for(device: torch.device) -> Event:
    """One whose waiting leaves the core to others."""
    cuda: Any = torch.cuda
    return cuda.Event(blocking=True) if device.type == "cuda" else Immediate()


class Lane:
    """One thread's way from files to the device. stream: of the copies, shared by the lanes; None on a CPU.

    A buffer is filled again only once its event tells that the device has read it.
    """

    def __init__(self, buffers: Sequence[Tensor], stream: torch.cuda.Stream | None, make_event: Callable[[], Event]) -> None:
        self._buffers = [(buffer, make_event()) for buffer in buffers]
        self._stream = stream
        self._turn = 0
        self.piece_bytes = len(buffers[0])

    def move(self, into: Tensor, dtype: torch.dtype, fill: Callable[[memoryview], None]) -> None:
        """Has the next buffer filled with elements of dtype and starts their copy into the flat tensor `into`, which may be
        read once the stream is synchronized. A conversion happens on the device, in memory of the stream's own."""
        buffer, emptied = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        assert len(into) * dtype.itemsize <= len(buffer), "a piece fits its buffer"
        staged = buffer[: len(into) * dtype.itemsize]
        emptied.synchronize()
        fill(staged.numpy().data)
        with torch.cuda.stream(self._stream):
            elements = staged.view(dtype)
            into.copy_(elements if dtype == into.dtype else elements.to(into.device, non_blocking=True), non_blocking=True)
            emptied.record(self._stream)
