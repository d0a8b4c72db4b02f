"""Staging buffers between files and a device. A reader thread fills one of its two while the device copies from the second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

BUFFERS = 2  # per thread
ALIGNMENT = 8  # bytes, the size of the largest element


class PinnedSlab:
    """Host memory, pinned for a GPU so that it copies while a thread reads. The creator calls release()."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)

    def release(self) -> None:
        """Returns the memory to the system, past torch's cache of pinned memory. No copy may be running."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        # torch.accelerator has the function since torch 2.12; CUDA builds before have the private name.
        empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
        if self._on_cuda and empty is not None:
            empty()


def buffers_of(slab: Tensor, threads: int) -> list[list[Tensor]]:
    """Cuts the slab into BUFFERS buffers of equal size for each thread. Raises ValueError if it is too small."""
    size = len(slab) // (threads * BUFFERS) // ALIGNMENT * ALIGNMENT
    if size == 0:
        raise ValueError(f"{len(slab)} bytes of staging are too few for {threads} threads")
    assert size * threads * BUFFERS <= len(slab), "all buffers lie in the slab"
    buffers = [slab[index * size : (index + 1) * size] for index in range(threads * BUFFERS)]
    return [buffers[first : first + BUFFERS] for first in range(0, len(buffers), BUFFERS)]


class Event(Protocol):
    """The used part of torch.cuda.Event."""

    def record(self, stream: torch.cuda.Stream | None) -> None: ...

    def synchronize(self) -> None:
        """Waits for the recorded work. Returns at once if none was recorded."""


class Immediate:
    """An event of a device whose copies are synchronous."""

    def record(self, stream: torch.cuda.Stream | None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def event_for(device: torch.device) -> Event:
    """Returns an event whose synchronize() sleeps instead of spinning."""
    cuda: Any = torch.cuda
    return cuda.Event(blocking=True) if device.type == "cuda" else Immediate()


class Lane:
    """The staging buffers of one reader thread. A buffer is filled again only after its event shows that it was copied."""

    def __init__(self, buffers: Sequence[Tensor], stream: torch.cuda.Stream | None, make_event: Callable[[], Event]) -> None:
        """
        Args:
            stream: CUDA stream of the copies, which all lanes share. None on a CPU.
        """
        self._buffers = [(buffer, make_event()) for buffer in buffers]
        self._stream = stream
        self._turn = 0
        self.piece_bytes = len(buffers[0])

    def move(self, into: Tensor, dtype: torch.dtype, fill: Callable[[memoryview], None]) -> None:
        """Fills the next buffer and starts its copy to the device, which also converts the elements.

        Args:
            into: flat destination. It may be read after the stream is synchronized.
            dtype: of the elements in the file.
            fill: writes the elements to the buffer.
        """
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
