"""The streams of a CPU: one thread that runs launched work in call order, in place of all three streams.

The loop's thread accesses no tensors, pools or relay. It queues work, and waits for the values that collect() returns. When work
runs, all earlier work is done, so that no stream has to wait for another. Threads of the page mover and of the KV server copy
pages of the pools in parallel. Host and device memory are the same.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.services.worker.exec.streams.cuda_streams import Arrival, LoadFailed, Mark, Moment, T

CLOSE_TIMEOUT_S = 30.0  # seconds for which close() waits for the thread


class _PassedMark:
    """A point on the stream of a CPU (see Mark). It has been passed, because all earlier work is done."""

    def wait(self) -> None:
        return

    def precede(self) -> None:
        return


class HostArrival:
    """A load of KV pages on a CPU (see Arrival). wait() blocks the calling thread until the group is loaded."""

    def __init__(self, groups: int) -> None:
        assert groups, "a load has at least one group"
        self._groups, self._complete = groups, 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._began = self._ended = time.perf_counter()

    def add(self, group: int) -> None:
        assert group == self._complete, "groups are loaded in order"
        with self._changed:
            self._complete, self._ended = group + 1, time.perf_counter()
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, group: int) -> None:
        self.settle(group)

    def settle(self, group: int) -> None:
        if self._complete > group:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._complete > group or self._error is not None)
            if self._complete <= group:
                raise LoadFailed("a load of KV pages has failed") from self._error

    @property
    def is_over(self) -> bool:
        return self._complete == self._groups

    @property
    def seconds(self) -> float:
        return self._ended - self._began


class HostMoment:
    """A Moment of a CPU."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, HostMoment), "both moments are of the same clock"
        return self._at - earlier._at


class HostStreams:
    """The Streams of a CPU."""

    def __init__(self, num_threads: int) -> None:
        """Starts the thread.

        Args:
            num_threads: threads with which torch computes. The number for our C++ kernels is set when they are loaded.
        """
        self._device = torch.device("cpu")
        self._nothing, self._past = nullcontext(), _PassedMark()
        self._closed = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(num_threads,), name="cpu-forward", daemon=True)
        self._thread.start()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def on_host(self) -> bool:
        return True

    def launch(self, work: Callable[[], None]) -> None:
        assert threading.current_thread() is not self._thread, "only the loop's thread launches work"
        self._queue.put(work)

    def collect(self, work: Callable[[], T]) -> Callable[[], T]:
        assert threading.current_thread() is not self._thread, (
            "only the loop's thread collects: work that waits for later work would never end"
        )
        if self._closed:
            raise RuntimeError("collect() was called after close(): the work would never run")
        future = Future[T]()
        self._queue.put(partial(_complete, future, work))
        return future.result

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # applies to the calling thread only
        with torch.inference_mode():
            while (work := self._queue.get()) is not None:
                work()

    def on_schedule(self) -> AbstractContextManager[Any]:
        return self._nothing

    def on_forward(self) -> AbstractContextManager[Any]:
        return self._nothing

    def on_copy(self) -> AbstractContextManager[Any]:
        return self._nothing

    def on_spare(self, priority: int = 0) -> AbstractContextManager[Any]:
        return self._nothing

    def forward_after_schedule(self) -> None:
        return

    def copy_after_forward(self) -> None:
        return

    def forward_after_copy(self) -> None:
        return

    def mark_copy(self) -> Mark:
        return self._past

    def arrival(self, groups: int) -> Arrival:
        return HostArrival(groups)

    def moment(self) -> Moment:
        return HostMoment()

    def staging(self, num_words: int) -> tuple[Tensor, Tensor]:
        memory = torch.empty(num_words, dtype=torch.int32)
        return memory, memory

    def to_host(self, source: Tensor) -> Tensor:
        return source

    def synchronize(self) -> None:
        assert threading.current_thread() is self._thread, (
            "synchronize() is called by work on the streams, so all earlier work is done"
        )


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        value = work()
    except BaseException as error:  # Future.result() raises it in the waiting thread
        future.set_exception(error)
    else:
        future.set_result(value)
