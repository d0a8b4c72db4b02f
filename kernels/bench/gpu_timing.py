"""Times work on a CUDA device: medians over replays of a CUDA graph, by events, so that no launch is in them.

A graph holds many calls, which go round among separate inputs: so many that together they are twice the L2 cache, where that
takes no more than MAX_COPIES. Where it would, inputs stay in the cache, as those of a small layer do between its kernels.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from kernels.bench.gpu_case import Make, Work

MAX_COPIES, MIN_CALLS, MIN_REPEATS, MAX_REPEATS = 16, 32, 5, 50
COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Timing:
    """microseconds: of one call. cold: whether inputs came from memory and not from the L2 cache."""

    microseconds: float
    cold: bool


def copies_for(bytes_moved: int, cache_bytes: int) -> int:
    return min(max(-(-2 * cache_bytes // max(bytes_moved, 1)), 1), MAX_COPIES)


class GpuTimer:
    """seconds: about how long one measurement may repeat its work. device: the current CUDA device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def time(self, make: Make, bytes_moved: int, captures: bool) -> Timing:
        """captures: see GpuCase; without, a call's launches are in its time."""
        copies = copies_for(bytes_moved, self._cache_bytes)
        works = [make(self._device) for _ in range(copies)]
        calls = -(-MIN_CALLS // copies) * copies
        for work in works:  # compiles, and lets libraries allocate what they keep
            work()
        torch.cuda.synchronize(self._device)
        repeat = _captured(works, calls) if captures else _in_turn(works, calls)
        median = self._median_ms(repeat) / calls
        return Timing(median * 1e3, copies * bytes_moved >= 2 * self._cache_bytes)

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written together, of copying COPY_BYTES."""

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
