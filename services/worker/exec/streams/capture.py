"""CUDA graphs: launches recorded once, replayed with one call. All of one GraphMemory share their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from services.worker.exec.streams.cuda_streams import Graph, Streams

WARM_UP_RUNS = 2  # before a capture: libraries choose kernels and take workspaces at first


class GraphMemory(Protocol):
    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs work on the forward stream to warm it up, then records it. It may not read a value of the device, and what it
        takes from the host counts as it is at this time."""


class CudaGraphMemory:
    """Graphs captured later must not be replayed at the same time as earlier ones: they share what they take in passing."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        with self._streams.on_forward():
            for _ in range(WARM_UP_RUNS):
                work()
        self._streams.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self._streams.on_forward():
            stream = torch.cuda.current_stream(self._streams.device)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                work()
        return graph
