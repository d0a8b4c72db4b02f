"""Captures decode steps as CUDA graphs: for each padded number of rows, one graph of the forward pass and one of sampling.

A graph is a sequence of launches that is recorded once and replayed with one call. All graphs share the memory of one
GraphMemory. Each row of a graph computes one token. A row reads its token id from the relay, which has the last sampled token of
each slot, unless the id is known from the plan or from a drafter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from rootstock_llm.services.worker.exec.attention.backend import AttentionBackend, AttentionBatch
from rootstock_llm.services.worker.exec.contracts.step_data import CudaGraph, ForwardBatch, SampleBatch
from rootstock_llm.services.worker.exec.contracts.step_parts import StepSampler
from rootstock_llm.services.worker.exec.step.passes import ForwardPass
from rootstock_llm.services.worker.exec.streams.cuda_streams import Graph, Streams

WARM_UP_RUNS = 2  # runs before a capture, during which libraries choose kernels and allocate workspaces


class CudaGraphRunner:
    """The captured graphs by padded number of rows.

    The largest graph is captured first. Smaller graphs reuse its memory.
    """

    def __init__(
        self, sizes: Sequence[int], memory: GraphMemory, forward: ForwardPass, sampler: StepSampler, attention: AttentionBackend
    ) -> None:
        self._sizes = sorted(sizes)
        assert len(set(sizes)) == len(sizes), "the sizes are distinct"
        self._memory, self._forward, self._sampler, self._attention = memory, forward, sampler, attention
        self._graphs: dict[int, CudaGraph] = {}
        self._with_known: set[int] = set()  # sizes of graphs whose `known` tensor may have ids other than -1

    def capture(self, report: Callable[[int, int], None]) -> None:
        """Captures a graph for each size.

        Args:
            report: called after each graph with the number of captured graphs and the total number of graphs.
        """
        for number, size in enumerate(reversed(self._sizes), 1):
            self._graphs[size] = self._captured(size)
            report(number, len(self._sizes))

    def release(self) -> None:
        self._graphs.clear()
        self._with_known.clear()
        self._attention.release_graphs()

    def for_rows(self, num_rows: int) -> CudaGraph | None:
        """Returns the smallest captured graph with at least num_rows rows, or None if there is no such graph."""
        index = bisect_left(self._sizes, num_rows)
        assert index == len(self._sizes) or self._sizes[index] >= num_rows, "the graph has at least num_rows rows"
        return self._graphs.get(self._sizes[index]) if num_rows > 0 and index < len(self._sizes) else None

    def set_known(self, graph: CudaGraph, known: Tensor | None) -> None:
        """Writes the known token ids of the next replay into the graph. Called on the forward stream.

        Args:
            known: int32[size], -1 for a row that reads the relay, or None if all rows read it.
        """
        if known is not None:
            assert len(known) == graph.size, "each row of the graph has an id or -1"
            graph.known.copy_(known)
            self._with_known.add(graph.size)
        elif graph.size in self._with_known:
            graph.known.fill_(-1)
            self._with_known.discard(graph.size)

    def _captured(self, size: int) -> CudaGraph:
        columns = ForwardBatch.idle(self._forward.capacity, size)
        words = torch.from_numpy(columns.words()).to(self._forward.device)
        device, has_states = self._forward.device, self._forward.has_states
        states = torch.full((4, size), -1, dtype=torch.int32, device=device) if has_states else None
        ids, rows = self._forward.fresh_rows(columns, words, states)
        known = torch.full((size,), -1, dtype=torch.int32, device=device)
        sampled = min(size, self._sampler.max_slots)
        slots, positions, _ = columns.sample_columns(words)
        inputs = self._sampler.fixed_inputs(slots[:sampled], positions[:sampled])
        self._attention.plan(AttentionBatch(columns.starts, columns.num_tokens, 0, rows, graph=size))
        computed: list[Tensor] = []

        def forward() -> None:
            self._forward.run(ids, rows, columns, None, known)
            computed[:] = [self._forward.all_logits(sampled)]

        forward_graph = self._memory.capture(forward)
        batch = replace(SampleBatch.idle(computed[0], inputs), fixed=True)
        sample_graph = self._memory.capture(lambda: self._sampler.run_kernels(batch))
        return CudaGraph(size, words, known, ids, rows, batch, forward_graph, sample_graph, states)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the ascending sizes of the graphs, up to max_rows. Small sizes are close, so that padding stays a small share."""
    steps = [1, 2, 4, *range(8, 32, 4), *range(32, 64, 8), *range(64, 256, 16), *range(256, max(257, max_rows), 64)]
    sizes = tuple(dict.fromkeys(size for size in (*steps, max_rows) if 0 < size <= max_rows))
    assert sizes == tuple(sorted(sizes)) and (not sizes or sizes[-1] == max_rows), "the sizes rise up to max_rows"
    return sizes


class GraphMemory(Protocol):
    """Captures graphs and owns the memory that they share."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs `work` on the forward stream to warm it up, then records its launches.

        `work` must not read values of the device. Values that it passes from the host to kernels are the same in every replay.
        """


class CudaGraphMemory:
    """Memory that CUDA graphs share for their temporary tensors.

    Two graphs with the same memory must not be replayed at the same time.
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
