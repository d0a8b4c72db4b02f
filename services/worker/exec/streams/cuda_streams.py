"""The streams on which steps run: three streams of a GPU, or one thread in place of them for a CPU (host_streams.py).

schedule   copies of the columns of each step to the device
forward    all computation, in the order of the steps
copy       copies of results to host memory
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Largest number of spare streams per priority. Torch has 32 streams per priority and returns them round robin. If more than 32
# were requested, spare streams would be the same as those of the steps.
MOST_SPARE = 8
CUDA: Any = torch.cuda  # torch does not declare the types of its streams and events


class Mark(Protocol):
    """A point on a stream."""

    def wait(self) -> None:
        """Blocks the caller until the device has passed the point. Releases the interpreter lock."""

    def precede(self) -> None:
        """Makes later work on the caller's current stream wait until the device has passed the point."""


class Arrival(Protocol):
    """A load of pages into the pools that runs in parallel with the steps.

    One thread loads one group of layers after another. Steps wait for groups.
    """

    def add(self, group: int) -> None:
        """Declares that the group is complete as soon as the work that is now on the current stream is done.

        Called by the loading thread, in the order of the groups.
        """

    def failed(self, error: BaseException) -> None:
        """Declares that the load has failed, so that no other group will be complete. Called by the loading thread."""

    def wait(self, group: int) -> None:
        """Makes later work on the caller's current stream wait for a group.

        On a GPU, add() must have been called for all groups.

        Raises:
            LoadFailed: the load has failed.
        """

    def settle(self, group: int) -> None:
        """Blocks until the group is complete. Releases the interpreter lock.

        Raises:
            LoadFailed: the load has failed.
            Exception: the device has failed.
        """

    @property
    def is_over(self) -> bool:
        """Whether all groups are complete."""

    @property
    def seconds(self) -> float:
        """Duration in seconds from the construction until the last group was complete. Valid only if `is_over` is True."""


class LoadFailed(RuntimeError):
    """Raised if a load has failed for which a step or another thread waits. The awaited pages will not arrive."""


class Moment(Protocol):
    """A point on the forward stream, for timing."""

    def seconds_since(self, earlier: Moment) -> float:
        """Waits until the device has passed this moment, and returns the seconds since an earlier one.

        Args:
            earlier: a moment of the same streams.
        """


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Launches the captured work on the current stream. It reads and writes the captured addresses."""


class Streams(Protocol):
    """The streams of one executor.

    One thread calls launch(), collect() and close(). Any thread may call on_spare() and arrival(). The other methods are called
    from within the work that is passed to launch() or collect(). This work runs in inference mode. Work for launch() must not
    raise.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def on_host(self) -> bool:
        """Whether the device is the host. Kernels are then done when their launch returns, and reading values does not block."""

    def launch(self, work: Callable[[], None]) -> None:
        """Runs `work` after all earlier work. `work` puts kernels and copies on the streams. Does not wait for the device."""

    def collect(self, work: Callable[[], T]) -> Callable[[], T]:
        """Runs `work`, which may wait for the device and read the results of earlier work.

        Returns:
            A function, to be called once. It blocks until the work is done, and then returns its value or raises its exception.
        """

    def close(self) -> None:
        """Ends the streams. The functions that collect() returned must have been called."""

    def on_schedule(self) -> AbstractContextManager[Any]: ...

    def on_forward(self) -> AbstractContextManager[Any]: ...

    def on_copy(self) -> AbstractContextManager[Any]: ...

    def on_spare(self, priority: int = 0) -> AbstractContextManager[Any]:
        """Makes a spare stream the current stream of the calling thread, which may be any thread.

        Args:
            priority: priority of the stream; below 0 for work that steps wait for.
        """

    def forward_after_schedule(self) -> None:
        """Makes later work on the forward stream wait for all work that is on the schedule stream."""

    def copy_after_forward(self) -> None: ...

    def forward_after_copy(self) -> None: ...

    def mark_copy(self) -> Mark: ...

    def arrival(self, groups: int) -> Arrival:
        """Returns an Arrival of `groups` groups. Its duration begins at the present point of the caller's current stream."""

    def moment(self) -> Moment:
        """Returns the present point of the forward stream, for timing."""

    def staging(self, num_words: int) -> tuple[Tensor, Tensor]:
        """Returns int32[num_words] in host memory, and a tensor of the same size on the device for its copy.

        Both are the same tensor if the device is the host.
        """

    def to_host(self, source: Tensor) -> Tensor:
        """Copies a tensor to host memory on the copy stream.

        Returns:
            The copy. Its values are valid after the host has waited for the next mark_copy(). If the device is the host, the
            source itself is returned.
        """

    def synchronize(self) -> None:
        """Blocks until the device has done all work. Raises the device's error if work has failed."""


class SpareStreams(Generic[T]):
    """Streams for threads that do not launch steps. Any thread may call lent().

    A stream is lent to one thread at a time. If all MOST_SPARE streams of a priority are lent, several threads share a stream.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        """Starts without streams.

        Args:
            make: makes a stream with the given priority.
        """
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[int, deque[T]] = defaultdict(deque)
        self._free: dict[int, list[T]] = defaultdict(list)

    @contextmanager
    def lent(self, priority: int) -> Iterator[T]:
        with self._lock:
            free, made = self._free[priority], self._made[priority]
            is_exclusive = bool(free) or len(made) < MOST_SPARE
            if free:
                stream = free.pop()
            elif is_exclusive:
                stream = self._make(priority)
                made.append(stream)
            else:
                stream = made[0]
                made.rotate(-1)
        try:
            yield stream
        finally:
            if is_exclusive:
                with self._lock:
                    free.append(stream)


class CudaStreams:
    """Streams of a GPU.

    launch() runs its work on the calling thread. Current streams are set for that thread only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedule, self._forward, self._copy = (CUDA.Stream(device) for _ in range(3))
        self._spare = SpareStreams(lambda priority: CUDA.Stream(device, priority))
        self._reached = CUDA.Event()  # event of _after()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def on_host(self) -> bool:
        return False

    def launch(self, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            work()

    def collect(self, work: Callable[[], T]) -> Callable[[], T]:
        """Runs `work` when the returned function is called, so that collect() itself does not wait for the device."""

        def collected() -> T:
            with torch.inference_mode():
                return work()

        return collected

    def close(self) -> None:
        return

    def on_schedule(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._schedule)

    def on_forward(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._forward)

    def on_copy(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copy)

    @contextmanager
    def on_spare(self, priority: int = 0) -> Iterator[None]:
        with self._spare.lent(priority) as stream, torch.cuda.stream(stream):
            yield

    def forward_after_schedule(self) -> None:
        self._after(self._forward, self._schedule)

    def copy_after_forward(self) -> None:
        self._after(self._copy, self._forward)

    def forward_after_copy(self) -> None:
        self._after(self._forward, self._copy)

    def _after(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Makes later work on the stream `later` wait for the work that is now on the stream `earlier`.

        Unlike Stream.wait_stream(), it creates no event per call. One event is enough, because a wait refers to the event's
        record at the time of the call.
        """
        self._reached.record(earlier)
        later.wait_event(self._reached)

    def mark_copy(self) -> Mark:
        event = CUDA.Event()
        event.record(self._copy)
        return CudaMark(event)

    def arrival(self, groups: int) -> Arrival:
        return CudaArrival(groups)

    def moment(self) -> Moment:
        event = CUDA.Event(enable_timing=True)
        event.record(self._forward)
        return CudaMoment(event)

    def staging(self, num_words: int) -> tuple[Tensor, Tensor]:
        host = torch.empty(num_words, dtype=torch.int32, pin_memory=True)
        return host, torch.empty(num_words, dtype=torch.int32, device=self._device)

    def to_host(self, source: Tensor) -> Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return host.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def precede(self) -> None:
        self._event.wait()


class CudaArrival:
    def __init__(self, groups: int) -> None:
        assert groups, "a load has at least one group"
        self._error: BaseException | None = None
        self._began, *self._events = (CUDA.Event(enable_timing=at in (0, groups)) for at in range(groups + 1))
        self._began.record()

    def add(self, group: int) -> None:
        self._events[group].record()

    def failed(self, error: BaseException) -> None:
        self._error = error

    def wait(self, group: int) -> None:
        if self._error is not None:
            raise LoadFailed("a load of KV pages has failed") from self._error
        self._events[group].wait()

    def settle(self, group: int) -> None:
        if self._error is not None:
            raise LoadFailed("a load of KV pages has failed") from self._error
        self._events[group].synchronize()

    @property
    def is_over(self) -> bool:
        return self._error is None and bool(self._events[-1].query())

    @property
    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._events[-1])) / 1000


class CudaMoment:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, CudaMoment), "both moments are of the same device"
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000
