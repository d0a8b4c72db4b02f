"""Times work on a CUDA device with events around replays of a CUDA graph, and takes the median.

The time does not include launches, except for work that a CUDA graph cannot capture, which is launched call by call.

A graph has many calls, which use several copies of the inputs in turn. Together, the copies are at least twice as large as the L2
cache, so that each call reads its inputs from memory. If this would take more than MAX_COPIES copies, there are MAX_COPIES
copies. The inputs may then stay in the cache, as the inputs of a small layer of a model do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]
Make = Callable[[torch.device], Work]


@dataclass(frozen=True, slots=True)
class GpuCase:
    """A kernel with inputs of one shape, which GpuTimer times."""

    name: str
    # Allocates inputs and outputs, and returns the timed work: one call of the kernel, without host work except the launch.
    # `make` is called once per copy of the inputs. The returned function owns its inputs.
    make: Make
    bytes_moved: int  # smallest number of bytes that one call reads and writes
    flops: int = 0  # floating-point operations of one call; 0: not reported
    captures: bool = True  # whether a CUDA graph can capture the work; if False, each call is launched separately
    plain: Make | None = None  # the same work in plain torch; None: there is no comparison
    plain_captures: bool = True  # whether a CUDA graph can capture `plain`


MAX_COPIES, MIN_CALLS, MIN_REPEATS, MAX_REPEATS = 16, 32, 5, 50
COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one call."""

    microseconds: float
    cold: bool  # whether the inputs came from memory and not from the L2 cache


def copies_for(bytes_moved: int, cache_bytes: int) -> int:
    return min(max(-(-2 * cache_bytes // max(bytes_moved, 1)), 1), MAX_COPIES)


class GpuTimer:
    """Times work on the current CUDA device. `seconds` is the approximate time for which one measurement repeats its work."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def time(self, make: Make, bytes_moved: int, captures: bool) -> Timing:
        """Times the work that `make` returns. If `captures` is False, the time includes the launches of a call."""
        copies = copies_for(bytes_moved, self._cache_bytes)
        works = [make(self._device) for _ in range(copies)]
        calls = -(-MIN_CALLS // copies) * copies
        for work in works:  # the first calls compile kernels and allocate the workspaces of libraries
            work()
        torch.cuda.synchronize(self._device)
        repeat = _captured(works, calls) if captures else _in_turn(works, calls)
        median = self._median_ms(repeat) / calls
        return Timing(median * 1e3, copies * bytes_moved >= 2 * self._cache_bytes)

    def copy_bandwidth(self) -> float:
        """Returns the bandwidth of a copy of COPY_BYTES in bytes per second. Read and written bytes both count."""

        def make(device: torch.device) -> Work:
            source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        return 2 * COPY_BYTES / (self.time(make, 2 * COPY_BYTES, captures=True).microseconds * 1e-6)

    def _median_ms(self, repeat: Work) -> float:
        first = _elapsed_ms([_timed(repeat)])[0]
        count = min(max(int(self._seconds * 1e3 / max(first, 1e-3)), MIN_REPEATS), MAX_REPEATS)
        return statistics.median(_elapsed_ms([_timed(repeat) for _ in range(count)]))


def _captured(works: list[Work], calls: int) -> Work:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _in_turn(works, calls)()
    return graph.replay


def _in_turn(works: list[Work], calls: int) -> Work:
    def run() -> None:
        for call in range(calls):
            works[call % len(works)]()

    return run


def _timed(repeat: Work) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    repeat()
    ended.record()
    return begun, ended


def _elapsed_ms(pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) for begun, ended in pairs]
