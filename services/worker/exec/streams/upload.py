"""What a step brings to the device: columns packed into one buffer, copied in one go on the schedule stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.exec.streams.cuda_streams import Mark, Streams

I32 = NDArray[np.int32]
Sections = Sequence[tuple[str, NDArray[np.generic]]]
DEPTH = 4  # steps whose buffers may be on their way: at most two are, one more is being filled
ALIGNED = 4  # words: kernels are compiled apart for tensors that begin at a multiple of 16 bytes, and for those that do not


def as_words(array: NDArray[np.generic]) -> I32:
    """int32[n]: 4-byte elements by their bits, others of integer type by value."""
    flat = np.ascontiguousarray(array).reshape(-1)
    assert flat.itemsize == 4 or flat.dtype.kind in "iu", "what goes by value is whole numbers"
    words: I32 = flat.view(np.int32) if flat.itemsize == 4 else flat.astype(np.int32)
    return words


def _room(words: I32) -> int:
    """Words that a section takes up."""
    return -(-len(words) // ALIGNED) * ALIGNED


class _Buffer:
    """One buffer of the host and its twin on the device. used_until: after which both may be written again."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        self.host, self.device = streams.staging(capacity)
        self.words: I32 = self.host.numpy()
        self.used_until: Mark | None = None


class UploadRing:
    """capacity: words of a buffer to begin with; one that is too small is replaced, which costs once."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        self._streams = streams
        self._buffers = [self._made(capacity) for _ in range(DEPTH)]
        self._next = 0
        self._open: list[_Buffer] = []

    def send(self, sections: Sections) -> dict[str, Tensor]:
        """Copies the sections and returns each as int32[its words] on the device, by name, valid until release() and DEPTH - 1
        sends more. What reads them must follow the schedule stream (Streams.forward_after_schedule)."""
        parts = [(name, as_words(array)) for name, array in sections]
        total = sum(_room(words) for _, words in parts)
        buffer = self._take(total)
        views, at = {}, 0
        for name, words in parts:
            end = at + len(words)
            buffer.words[at:end] = words
            views[name] = buffer.device[at:end]
            at += _room(words)
        assert at == total <= len(buffer.words), "every section lies inside the buffer"
        assert len(views) == len(parts), "no two sections have one name"
        if total and buffer.device is not buffer.host:
            with self._streams.on_schedule():
                buffer.device[:total].copy_(buffer.host[:total], non_blocking=True)
        return views

    def release(self, mark: Mark) -> None:
        """All that was sent so far is read before the mark."""
        assert len(self._open) <= DEPTH, "no more steps are on their way than there are buffers"
        for buffer in self._open:
            buffer.used_until = mark
        self._open.clear()

    def _made(self, capacity: int) -> _Buffer:
        """On the schedule stream, which writes it: another stream's memory may be new to us and still be read there."""
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
        assert len(buffer.words) >= words, "a buffer holds what is sent in it"
        buffer.used_until = None
        self._open.append(buffer)
        return buffer
