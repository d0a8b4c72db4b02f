"""Streams that imitate a slow device: a result is junk until the code has waited for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rootstock_llm.services.worker.exec.streams.cuda_streams import Mark
from tests.exec.device_doubles import HostWaits, InlineStreams, Watch

JUNK = -1_234_567


def _junk_like(source: Tensor) -> Tensor:
    return torch.full_like(source, float("nan") if source.is_floating_point() else JUNK)


class _NumbersStayAway(TorchFunctionMode):
    """Refuses torch.where with a Python number as an argument.

    On a GPU, torch would copy the number from unpinned memory to the device, and the host would wait for the copy.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = getattr(func, "__name__", "") == "where" and not self._watch.inside_kernel
        if where and any(isinstance(each, int | float) for each in args):
            raise HostWaits("a step calls torch.where with a number, so the host waits for its copy")
        return func(*args, **(kwargs or {}))


class _Reached:
    def __init__(self, streams: LateStreams, copies: int) -> None:
        self._streams, self._copies = streams, copies

    def wait(self) -> None:
        self._streams.deliver(self._copies)


class LateStreams(InlineStreams):
    """Streams that fill unfinished copies with junk.

    - A copy to the host is junk until the host waits for a mark that follows the copy. It stays junk if the copy stream did not
      wait for the computation of the copied values.
    - An upload is junk until the forward stream waits for the schedule stream.

    Work that a step launches must not make the host wait.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        """Creates streams without copies.

        Args:
            watch: records whether a kernel runs. Required if torch's reference kernels, which may wait, replace GPU kernels.
        """
        super().__init__()
        self._watch = watch or Watch()
        self.waits = 0  # number of times that the host has waited for an unfinished copy
        self._copies: list[tuple[Tensor, Tensor]] = []  # unfinished copies to the host, with their final values
        self._made = 0
        self._copy_follows = True
        self._buffers: list[tuple[Tensor, Tensor]] = []  # upload buffers, with their last written values
        self._sent: list[int] = []  # indices of uploaded buffers for which the forward stream has not waited yet

    def launch(self, work: Callable[[], None]) -> None:
        with _NumbersStayAway(self._watch):
            super().launch(work)

    def staging(self, num_words: int) -> tuple[Tensor, Tensor]:
        host, device = (torch.full((num_words,), JUNK, dtype=torch.int32) for _ in range(2))
        self._buffers.append((device, device.clone()))
        return host, device

    @contextmanager
    def _scheduling(self) -> Iterator[None]:
        yield
        for index, (device, known) in enumerate(self._buffers):
            written = bool((device != JUNK).any()) if index in self._sent else not torch.equal(device, known)
            if written:
                known.copy_(device)
                device.fill_(JUNK)
                self._sent.append(index)

    def on_schedule(self) -> AbstractContextManager[Any]:
        return self._scheduling()

    def forward_after_schedule(self) -> None:
        for index in self._sent:
            device, known = self._buffers[index]
            device.copy_(known)
        self._sent.clear()

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        yield
        self._copy_follows = False

    def on_forward(self) -> AbstractContextManager[Any]:
        return self._forwarding()

    def copy_after_forward(self) -> None:
        self._copy_follows = True

    def to_host(self, source: Tensor) -> Tensor:
        host = _junk_like(source)
        self._copies.append((host, source.clone() if self._copy_follows else host.clone()))
        return host

    def mark_copy(self) -> Mark:
        return _Reached(self, self._made + len(self._copies))

    def deliver(self, copies: int) -> None:
        """Writes final values until the first `copies` copies since the start are finished."""
        self.waits += self._made < copies
        while self._made < copies:
            host, value = self._copies.pop(0)
            host.copy_(value)
            self._made += 1

    def synchronize(self) -> None:
        self.deliver(self._made + len(self._copies))
