"""The streams on which steps run, and their order: three streams of a GPU, or one thread of a CPU.

schedule   one copy per step, from host memory
forward    all computation, in step order
copy       results to host memory
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
# Streams per priority. Torch has 32 streams per priority and returns them in turn, so that a larger number of new streams would
# include those of the steps.
MOST_SPARE = 8
CUDA: Any = torch.cuda  # torch does not declare the types of its streams and events


class Mark(Protocol):
    """A point on a stream."""

    def wait(self) -> None:
        """Blocks the caller until the device has passed the point. Releases the interpreter lock."""

    def precede(self) -> None:
        """Makes later work on the caller's current stream wait until the device has passed the point."""


class Arrival(Protocol):
    """A load into device memory that runs in parallel with the steps.

    One thread fills the memory, group after group. Steps wait for groups.
    """

    def came(self, group: int) -> None:
        """Reports that the group is complete when the work now on the current stream is done.

        Called by the loading thread, in order.
        """

    def failed(self, error: BaseException) -> None:
        """Reports that the load has failed, so that no further group arrives. Called by the loading thread."""

    def wait(self, group: int) -> None:
        """Makes later work on the caller's current stream wait for a group.

        On a device, came() must have been called for all groups.

        Raises:
            NeverCame: the load has failed.
        """

    def settle(self, group: int) -> None:
        """Blocks until the group is complete. Releases the interpreter lock.

        Raises:
            NeverCame: the load has failed.
            Exception: the device has failed.
        """

    @property
    def is_over(self) -> bool:
        """Whether all groups are complete."""

    @property
    def seconds(self) -> float:
        """Duration from the construction to the last group. Valid after the last group."""


class NeverCame(RuntimeError):
    """Raised to threads that wait for a load if the load has failed."""


class Moment(Protocol):
    """A point in time of the forward stream."""

    def seconds_since(self, earlier: Moment) -> float:
        """Waits for this moment and returns the seconds since an earlier one.

        Args:
            earlier: a moment of the same streams.
        """


class Graph(Protocol):
    """Captured launches."""

    def replay(self) -> None:
        """Launches the captured work on the current stream. It reads and writes the captured addresses."""


class Streams(Protocol):
    """The streams of one executor.

    One thread calls launch, collect and close. The other methods are called from within the work that these methods were given.
    All work runs in inference mode. Work must not raise, except for work given to collect().
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def on_host(self) -> bool:
        """Whether the device is the host: launched work is done on return, and reading its values does not block."""

    def launch(self, work: Callable[[], None]) -> None:
        """Runs `work`, which adds its part of a step to the streams after all earlier parts. Does not wait for the device."""

    def collect(self, work: Callable[[], T]) -> Callable[[], T]:
        """Runs `work`, which reads the results of earlier launches.

        Returns:
            A function, to be called once. It blocks until the work is done, and then returns its value or raises its exception.
        """

    def close(self) -> None:
        """Ends the streams. All collected work must be done."""

    def on_schedule(self) -> AbstractContextManager[Any]: ...

    def on_forward(self) -> AbstractContextManager[Any]: ...

    def on_copy(self) -> AbstractContextManager[Any]: ...

    def beside(self, priority: int = 0) -> AbstractContextManager[Any]:
        """Makes a spare stream the current stream of a thread that runs in parallel with the steps.

        Args:
            priority: below 0 for work that steps wait for.
        """

    def forward_after_schedule(self) -> None:
        """Makes later work on the forward stream wait for all work that is on the schedule stream."""

    def copy_after_forward(self) -> None: ...

    def forward_after_copy(self) -> None: ...

    def mark_copy(self) -> Mark: ...

    def arrival(self, groups: int) -> Arrival:
        """Returns an arrival of `groups` groups, which begins at the present point of the caller's current stream."""

    def moment(self) -> Moment:
        """Returns the present point of the forward stream, for timing."""

    def staging(self, num_words: int) -> tuple[Tensor, Tensor]:
        """Returns int32[num_words] in host memory, and its copy target on the device.

        Both are the same tensor if the device is the host.
        """

    def to_host(self, source: Tensor) -> Tensor:
        """Copies a tensor to host memory on the copy stream.

        Returns:
            The copy. Its values are valid after the host has waited for the next mark_copy(). If the device is the host, returns
            the source itself.
        """

    def synchronize(self) -> None:
        """Blocks until the device has done all work. Raises the error of the device."""


class SpareStreams(Generic[T]):
    """Streams for threads that do not launch steps.

    Each stream is lent to one thread at a time. If all are lent, further threads share them. Any thread may call `lent`.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        """Starts without streams.

        Args:
            make: makes a stream of a priority.
        """
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[int, deque[T]] = defaultdict(deque)
        self._free: dict[int, list[T]] = defaultdict(list)

    @contextmanager
    def lent(self, priority: int) -> Iterator[T]:
        with self._lock:
            free, made = self._free[priority], self._made[priority]
            is_own = bool(free) or len(made) < MOST_SPARE
            if free:
                stream = free.pop()
            elif is_own:
                stream = self._make(priority)
                made.append(stream)
            else:
                stream = made[0]
                made.rotate(-1)
        try:
            yield stream
        finally:
            if is_own:
                with self._lock:
                    free.append(stream)


class CudaStreams:
    """Streams of a GPU.

    Work runs on the calling thread, which only launches it. Current streams are set for that thread only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedule, self._forward, self._copy = (CUDA.Stream(device) for _ in range(3))
        self._spare = SpareStreams(lambda priority: CUDA.Stream(device, priority))
        self._reached = CUDA.Event()  # one event is enough for all calls, because each call records it and waits for it at once

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
        """Runs the work when its value is requested, so that the device computes until then."""

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
    def beside(self, priority: int = 0) -> Iterator[None]:
        with self._spare.lent(priority) as stream, torch.cuda.stream(stream):
            yield

    def forward_after_schedule(self) -> None:
        self._after(self._forward, self._schedule)

    def copy_after_forward(self) -> None:
        self._after(self._copy, self._forward)

    def forward_after_copy(self) -> None:
        self._after(self._forward, self._copy)

    def _after(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """Makes a stream wait for another one.

        Unlike Stream.wait_stream, it does not create an event per call: the device uses the event's state at the time of the
        call.
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
        assert groups, "an arrival has groups"
        self._error: BaseException | None = None
        self._began, *self._events = (CUDA.Event(enable_timing=at in (0, groups)) for at in range(groups + 1))
        self._began.record()

    def came(self, group: int) -> None:
        self._events[group].record()

    def failed(self, error: BaseException) -> None:
        self._error = error

    def wait(self, group: int) -> None:
        if self._error is not None:
            raise NeverCame("pages did not come") from self._error
        self._events[group].wait()

    def settle(self, group: int) -> None:
        if self._error is not None:
            raise NeverCame("pages did not come") from self._error
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
        assert isinstance(earlier, CudaMoment), "moments of one device"
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000
