"""Copies results from the device to host memory, on the copy stream."""

from __future__ import annotations

from torch import Tensor

from services.worker.exec.streams.cuda_streams import Mark, Streams


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
        assert self.mark is None, "nothing joins copies that are under way"
        self._sources[name] = tensor

    def launch(self) -> Mark:
        """Copies the added tensors after the work that is on the forward stream. Returns the end of the copies."""
        assert self.mark is None, "results are sent back once"
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
