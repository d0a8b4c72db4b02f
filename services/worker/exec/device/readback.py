"""Results on their way from the device to pinned host memory, on the copy stream."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.exec.device.streams import Mark, Streams


class Readback:
    """Tensors named as they are wanted on the host. Holds what it copies until host() has waited for it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._sources: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._mark: Mark | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """tensor: on the device, not written again before host(), unless through Streams.forward_after_copy."""
        self._sources[name] = tensor

    def launch(self) -> Mark:
        """Copies what was added, once the forward stream has come to this point. Returns where the copies are done."""
        self._streams.copy_after_forward()
        pinned = self._streams.device.type == "cuda"
        with self._streams.on_copy():
            for name, source in self._sources.items():
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
                self._copies[name] = copy.copy_(source, non_blocking=True)
        self._mark = self._streams.mark_copy()
        return self._mark

    def host(self) -> dict[str, Tensor]:
        """The copies, complete."""
        if self._mark is None:
            raise RuntimeError("nothing was launched")
        self._mark.wait()
        self._sources.clear()
        return self._copies
