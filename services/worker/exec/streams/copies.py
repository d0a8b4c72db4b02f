"""Copies a step's columns to the device on the schedule stream, and its results to the host on the copy stream.

An upload packs all columns of a step into one buffer, and copies the buffer once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.services.worker.exec.streams.cuda_streams import Mark, Streams

I32 = NDArray[np.int32]
Sections = Sequence[tuple[str, NDArray[np.generic]]]
DEPTH = 4  # number of buffers of a ring; at most two are copied or read at a time, and one is filled
ALIGNED = 4  # words; each section begins at a multiple of 16 bytes, because Triton compiles another variant of a kernel otherwise


class UploadRing:
    """A ring of upload buffers. Each send() uses the next one."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        """Allocates the buffers.

        Args:
            streams: streams of the executor.
            capacity: first size of a buffer in words. A buffer that is too small is replaced by a larger one.
        """
        self._streams = streams
        self._buffers = [self._allocated(capacity) for _ in range(DEPTH)]
        self._next = 0
        self._open: list[_Buffer] = []

    def send(self, sections: Sections) -> dict[str, Tensor]:
        """Uploads sections and returns them by name, each as int32[words] on the device.

        Work that reads the tensors must be launched after Streams.forward_after_schedule(). All such work must be launched before
        release(). A buffer is reused after DEPTH - 1 other sends.
        """
        parts = [(name, as_words(array)) for name, array in sections]
        total = sum(_padded_size(words) for _, words in parts)
        buffer = self._take(total)
        views, at = {}, 0
        for name, words in parts:
            end = at + len(words)
            buffer.words[at:end] = words
            views[name] = buffer.device[at:end]
            at += _padded_size(words)
        assert at == total <= len(buffer.words), "all sections fit into the buffer"
        assert len(views) == len(parts), "section names are distinct"
        if total and buffer.device is not buffer.host:
            with self._streams.on_schedule():
                buffer.device[:total].copy_(buffer.host[:total], non_blocking=True)
        return views

    def release(self, mark: Mark) -> None:
        """Declares that no work reads the tensors of earlier sends after the device has passed the mark."""
        assert len(self._open) <= DEPTH, "at most DEPTH steps are in flight"
        for buffer in self._open:
            buffer.used_until = mark
        self._open.clear()

    def _allocated(self, capacity: int) -> _Buffer:
        """Allocates a buffer on the schedule stream, which writes it.

        Otherwise, torch could return memory that it has cached for another stream, and earlier work on that stream could still
        read this memory.
        """
        with self._streams.on_schedule():
            return _Buffer(self._streams, capacity)

    def _take(self, words: int) -> _Buffer:
        index, self._next = self._next, (self._next + 1) % DEPTH
        buffer = self._buffers[index]
        if buffer in self._open:
            raise RuntimeError(f"send() was called {DEPTH} times without a release()")
        if buffer.used_until is not None:
            buffer.used_until.wait()
        if len(buffer.words) < words:
            buffer = self._buffers[index] = self._allocated(2 * words)
        assert len(buffer.words) >= words, "the buffer is at least as large as its sections"
        buffer.used_until = None
        self._open.append(buffer)
        return buffer


class _Buffer:
    """Memory of one upload on the host and on the device. Both are the same tensor if the device is the host."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        self.host, self.device = streams.staging(capacity)
        self.words: I32 = self.host.numpy()
        self.used_until: Mark | None = None  # mark after which the memory may be written again; None if it may be written now


def as_words(array: NDArray[np.generic]) -> I32:
    """Returns int32[n]. Elements of 4 bytes keep their bits; other integers keep their values."""
    flat = np.ascontiguousarray(array).reshape(-1)
    assert flat.itemsize == 4 or flat.dtype.kind in "iu", "elements that do not have 4 bytes are integers"
    words: I32 = flat.view(np.int32) if flat.itemsize == 4 else flat.astype(np.int32)
    return words


def _padded_size(words: I32) -> int:
    """Returns the number of int32 words that a section occupies in the buffer: its length rounded up to a multiple of ALIGNED."""
    return -(-len(words) // ALIGNED) * ALIGNED


class Readback:
    """Copies results of one step to the host, by name. It refers to the results until host() has waited for the copies."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._sources: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self.mark: Mark | None = None  # point on the copy stream after the copies, None before launch()

    @property
    def empty(self) -> bool:
        """Whether no tensor was added."""
        return not self._sources

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor of the device.

        The tensor must not be written before host(), except by work that is launched after Streams.forward_after_copy().
        """
        assert self.mark is None, "no tensor is added after the launch"
        self._sources[name] = tensor

    def launch(self) -> Mark:
        """Copies the added tensors after all work that is now on the forward stream. Returns the point after the copies."""
        assert self.mark is None, "launch() is called once"
        self._streams.copy_after_forward()
        with self._streams.on_copy():
            for name, source in self._sources.items():
                self._copies[name] = self._streams.to_host(source)
        self.mark = self._streams.mark_copy()
        return self.mark

    def host(self) -> dict[str, Tensor]:
        """Waits for the copies and returns them. Empty if no tensor was added."""
        if self.mark is None and self._sources:
            raise RuntimeError("host() was called before launch()")
        if self.mark is not None:
            self.mark.wait()
        self._sources.clear()
        return self._copies
