"""The streams that steps run on, and what waits for what: a GPU's three, or one thread of a CPU.

schedule: one copy per step, from host memory. forward: all that computes, in step order. copy: results to host memory.
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
MOST_SPARE = 8  # streams of one priority: torch has 32 of each and gives them out in turn, who makes more has the steps' at last
CUDA: Any = torch.cuda  # torch says nothing of the types of its streams and events


class Mark(Protocol):
    """A point on a stream."""

    def wait(self) -> None:
        """Blocks the caller until the device is past it, without the interpreter lock."""

    def precede(self) -> None:
        """The device is past it before anything that the caller's thread puts on its current stream from now on."""


class Arrival(Protocol):
    """Memory of the device that one thread fills beside the steps, group after group, and that steps wait for by groups."""

    def came(self, group: int) -> None:
        """Called by that thread, in order: all of the group is there once what its current stream holds by now is done."""

    def failed(self, error: BaseException) -> None:
        """Called by that thread: no group comes any more."""

    def wait(self, group: int) -> None:
        """What the caller's thread puts on its current stream from now on finds the group there. On a device all groups have
        come() by then. Raises NeverCame."""

    def settle(self, group: int) -> None:
        """Blocks until the group is there, without the interpreter lock. Raises NeverCame, or what the device has failed with."""

    @property
    def is_over(self) -> bool:
        """All groups are there."""

    @property
    def seconds(self) -> float:
        """From its making to its last group, once it is over."""


class NeverCame(RuntimeError):
    """What was to be there could not be brought there."""


class Moment(Protocol):
    """When the forward stream was somewhere."""

    def seconds_since(self, earlier: Moment) -> float:
        """Waits for it. earlier: of the same streams."""


class Graph(Protocol):
    def replay(self) -> None:
        """Launches on the current stream; all that was captured reads and writes the same addresses again."""


class Streams(Protocol):
    """launch and collect are called from one thread, close too; all else from within what they were given. Each piece of work
    runs in inference mode, and raises nothing unless it was collected."""

    @property
    def device(self) -> torch.device: ...

    @property
    def on_host(self) -> bool:
        """The device is the host: what was launched is done, and a look at its values waits for nothing."""

    def launch(self, work: Callable[[], None]) -> None:
        """Has work put its part of a step on the streams, behind all that was launched before. Returns without waiting for
        what it computes."""

    def collect(self, work: Callable[[], T]) -> Callable[[], T]:
        """work reads what was launched before it. Returns what gives its value or raises its exception, and blocks until then;
        to be called once."""

    def close(self) -> None:
        """Once all that was collected is here: ends what the streams run on."""

    def on_schedule(self) -> AbstractContextManager[Any]: ...

    def on_forward(self) -> AbstractContextManager[Any]: ...

    def on_copy(self) -> AbstractContextManager[Any]: ...

    def beside(self, priority: int = 0) -> AbstractContextManager[Any]:
        """For a thread beside the steps: what it puts on the device is on none of their streams. priority: below 0 for what
        steps wait for."""

    def forward_after_schedule(self) -> None:
        """What comes next on forward waits for all that schedule holds."""

    def copy_after_forward(self) -> None: ...

    def forward_after_copy(self) -> None: ...

    def mark_copy(self) -> Mark: ...

    def arrival(self, groups: int) -> Arrival:
        """Of so many groups, that begins where the current stream of the caller's thread is."""

    def moment(self) -> Moment:
        """Where the forward stream is, to be timed."""

    def staging(self, num_words: int) -> tuple[Tensor, Tensor]:
        """int32[num_words] that the host writes, and where the device reads them once they were copied there: the same memory
        where the device is the host."""

    def to_host(self, source: Tensor) -> Tensor:
        """On the copy stream: where the host finds the source's values once it is past the next mark. The source itself where
        the device is the host."""

    def synchronize(self) -> None:
        """Blocks until the device has done everything. Raises what the device has failed with."""


class SpareStreams(Generic[T]):
    """Streams beside those of the steps, lent to one thread at a time; threads that come when all are lent share them. make: one
    of a priority. For any thread."""

    def __init__(self, make: Callable[[int], T]) -> None:
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
    """Work runs on the calling thread, which it does not keep: launching is all there is to do. Current streams are set for
    that thread alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedule, self._forward, self._copy = (CUDA.Stream(device) for _ in range(3))
        self._spare = SpareStreams(lambda priority: CUDA.Stream(device, priority))
        self._reached = CUDA.Event()  # recorded and waited for at once, so that one serves all

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
        """Runs it where its value is asked for: until then the device computes."""

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
        """Stream.wait_stream without an event made and destroyed each time: the device takes the event as it stands."""
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
        assert groups, "an arrival is of something"
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
