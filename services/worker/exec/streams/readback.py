"""Results on their way from the device to host memory, on the copy stream."""

from __future__ import annotations

from torch import Tensor

from services.worker.exec.streams.cuda_streams import Mark, Streams


class Readback:
    """Tensors named as they are wanted on the host. Holds what it copies until host() has waited for it. empty: nothing was
    added; mark: where the copies are done, None before launch()."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._sources: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self.mark: Mark | None = None

    @property
    def empty(self) -> bool:
        return not self._sources

    def add(self, name: str, tensor: Tensor) -> None:
        """tensor: on the device, not written again before host(), unless through Streams.forward_after_copy."""
        assert self.mark is None, "nothing joins copies that are under way"
        self._sources[name] = tensor

    def launch(self) -> Mark:
        """Copies what was added, once the forward stream has come to this point. Returns where the copies are done."""
        assert self.mark is None, "results are sent back once"
        self._streams.copy_after_forward()
        with self._streams.on_copy():
            for name, source in self._sources.items():
                self._copies[name] = self._streams.to_host(source)
        self.mark = self._streams.mark_copy()
        return self.mark

    def host(self) -> dict[str, Tensor]:
        """The copies, complete; none where nothing was added."""
        if self.mark is None and self._sources:
            raise RuntimeError("nothing was launched")
        if self.mark is not None:
            self.mark.wait()
        self._sources.clear()
        return self._copies
