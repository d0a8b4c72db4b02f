"""CUDA graphs: launches that are recorded once and replayed with one call. All graphs of one GraphMemory share their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from services.worker.exec.streams.cuda_streams import Graph, Streams

WARM_UP_RUNS = 2  # runs before a capture, in which libraries choose kernels and allocate workspaces


class GraphMemory(Protocol):
    """Captures graphs and owns the memory that they share."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs `work` on the forward stream to warm it up, then records it.

        `work` must not read a value of the device. Values that it takes from the host are recorded as they are now.
        """


class CudaGraphMemory:
    """Memory for CUDA graphs, which share their temporary tensors.

    Two graphs of one memory must not be replayed at the same time.
    """

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
