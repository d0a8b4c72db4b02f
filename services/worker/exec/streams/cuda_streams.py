"""The three streams of a device, and what waits for what. On a CPU every call runs where it stands.

schedule: one copy per step, from pinned memory. forward: all that computes, in step order. copy: results to pinned memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point on a stream."""

    def wait(self) -> None:
        """Blocks the caller until the device is past it, without the interpreter lock."""


class Streams(Protocol):
    """All calls from one thread."""

    @property
    def device(self) -> torch.device: ...

    def on_schedule(self) -> AbstractContextManager[Any]: ...

    def on_forward(self) -> AbstractContextManager[Any]: ...

    def on_copy(self) -> AbstractContextManager[Any]: ...

    def forward_after_schedule(self) -> None:
        """What comes next on forward waits for all that schedule holds."""

    def copy_after_forward(self) -> None: ...

    def forward_after_copy(self) -> None: ...

    def mark_copy(self) -> Mark: ...

    def synchronize(self) -> None:
        """Blocks until the device has done everything. Raises what the device has failed with."""


class CudaStreams:
    """Current streams are set for the calling thread alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedule, self._forward, self._copy = (torch.cuda.Stream(device) for _ in range(3))
        self._reached = torch.cuda.Event()  # recorded and waited for at once, so that one serves all

    @property
    def device(self) -> torch.device:
        return self._device

    def on_schedule(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._schedule)

    def on_forward(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._forward)

    def on_copy(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copy)

    def forward_after_schedule(self) -> None:
        self._after(self._forward, self._schedule)

    def copy_after_forward(self) -> None:
        self._after(self._copy, self._forward)

    def forward_after_copy(self) -> None:
        self._after(self._forward, self._copy)

    def _after(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Stream.wait_stream without an event made and destroyed each time: the device takes the event as it stands."""
        self._reached.record(earlier)
        later.wait_event(self._reached)

    def mark_copy(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._copy)
        return CudaMark(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class InlineStreams:
    """For a CPU: every stream is the calling thread, and whatever was launched is done."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    def on_schedule(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def on_forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def on_copy(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def forward_after_schedule(self) -> None:
        return

    def copy_after_forward(self) -> None:
        return

    def forward_after_copy(self) -> None:
        return

    def mark_copy(self) -> Mark:
        return PastMark()

    def synchronize(self) -> None:
        return


class PastMark:
    def wait(self) -> None:
        return


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else InlineStreams()
