"""Copies between host and device: the columns of a step on the schedule stream, and its results on the copy stream.

An upload packs the columns into one buffer and copies it once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.services.worker.exec.streams.cuda_streams import Mark, Streams

I32 = NDArray[np.int32]
Sections = Sequence[tuple[str, NDArray[np.generic]]]
DEPTH = 4  # number of buffers; at most two are being copied or read, and one is being filled
ALIGNED = 4  # words of alignment; Triton compiles a second variant for tensors that do not begin at a multiple of 16 bytes


class UploadRing:
    """Buffers for uploads, used in turn."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        """Allocates the buffers.

        Args:
            streams: streams of the executor.
            capacity: first size of a buffer in words. A buffer that is too small is replaced by a larger one.
        """
        self._streams = streams
        self._buffers = [self._made(capacity) for _ in range(DEPTH)]
        self._next = 0
        self._open: list[_Buffer] = []

    def send(self, sections: Sections) -> dict[str, Tensor]:
        """Uploads sections and returns them by name, each as int32[words] on the device.

        Readers must follow the schedule stream (Streams.forward_after_schedule). The tensors are valid until release() and DEPTH
        - 1 further sends.
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
        assert at == total <= len(buffer.words), "every section lies inside the buffer"
        assert len(views) == len(parts), "no two sections have one name"
        if total and buffer.device is not buffer.host:
            with self._streams.on_schedule():
                buffer.device[:total].copy_(buffer.host[:total], non_blocking=True)
        return views

    def release(self, mark: Mark) -> None:
        """Declares that all readers of earlier sends have ended when the device passes the mark."""
        assert len(self._open) <= DEPTH, "at most DEPTH steps are in flight"
        for buffer in self._open:
            buffer.used_until = mark
        self._open.clear()

    def _made(self, capacity: int) -> _Buffer:
        """Allocates on the schedule stream, which writes the buffer. Memory freed on another stream may still be read there."""
        with self._streams.on_schedule():
            return _Buffer(self._streams, capacity)

    def _take(self, words: int) -> _Buffer:
        index, self._next = self._next, (self._next + 1) % DEPTH
        buffer = self._buffers[index]
        if buffer in self._open:
            raise RuntimeError(f"{DEPTH} sends without a release")
        if buffer.used_until is not None:
            buffer.used_until.wait()
        if len(buffer.words) < words:
            buffer = self._buffers[index] = self._made(2 * words)
        assert len(buffer.words) >= words, "a buffer has space for its sections"
        buffer.used_until = None
        self._open.append(buffer)
        return buffer


class _Buffer:
    """A buffer on the host and its copy on the device."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        self.host, self.device = streams.staging(capacity)
        self.words: I32 = self.host.numpy()
        self.used_until: Mark | None = None  # host and device memory may be written again after this mark


def as_words(array: NDArray[np.generic]) -> I32:
    """Returns int32[n]: elements of 4 bytes by their bits, other integers by value."""
    flat = np.ascontiguousarray(array).reshape(-1)
    assert flat.itemsize == 4 or flat.dtype.kind in "iu", "elements of another size are integers"
    words: I32 = flat.view(np.int32) if flat.itemsize == 4 else flat.astype(np.int32)
    return words


def _padded_size(words: I32) -> int:
    """Returns the number of int32 words that a section occupies in the buffer: its length rounded up to a multiple of ALIGNED."""
    return -(-len(words) // ALIGNED) * ALIGNED


class Readback:
    """The results of one step, by name. It references the tensors that it copies until host() has waited for the copies."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._sources: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self.mark: Mark | None = None  # the end of the copies, None before launch()

    @property
    def empty(self) -> bool:
        """Whether no tensor was added."""
        return not self._sources

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor of the device.

        It must not be written before host(), unless the write follows Streams.forward_after_copy.
        """
        assert self.mark is None, "no tensor is added after the launch"
        self._sources[name] = tensor

    def launch(self) -> Mark:
        """Copies the added tensors after the work that is on the forward stream. Returns the end of the copies."""
        assert self.mark is None, "results are copied once"
        self._streams.copy_after_forward()
        with self._streams.on_copy():
            for name, source in self._sources.items():
                self._copies[name] = self._streams.to_host(source)
        self.mark = self._streams.mark_copy()
        return self.mark

    def host(self) -> dict[str, Tensor]:
        """Waits for the copies and returns them. Empty if no tensor was added."""
        if self.mark is None and self._sources:
            raise RuntimeError("nothing was launched")
        if self.mark is not None:
            self.mark.wait()
        self._sources.clear()
        return self._copies
