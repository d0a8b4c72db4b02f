"""Decode steps as CUDA graphs: one for the forward pass and one for sampling per padded number of rows.

A row is a token. Most are the last ones of their sequences, relayed; beside them may stand tokens that the plan gives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.exec.attention.backend import AttentionBackend, AttentionBatch
from services.worker.exec.sampling.sampler import DeviceSampler, SampleSpace
from services.worker.exec.step.forward_batch import DeviceColumns, StepColumns
from services.worker.exec.step.passes import ForwardPass
from services.worker.exec.streams.capture import Graph, GraphMemory


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """words: where the step's columns are copied to; known: int32[size], the ids that the plan gives, -1 for relayed ones; ids,
    rows, space and logits: what the captured kernels read and write, space and logits for the first rows alone where more
    than there are slots are computed. A graph keeps addresses and no tensors: all that was made before its capture has to be
    here, or its memory goes to others."""

    size: int
    words: Tensor
    known: Tensor
    ids: Tensor
    rows: RaggedRows
    space: SampleSpace
    logits: Tensor
    forward: Graph
    sample: Graph


class DecodeGraphs:
    """Captured one after the other, the largest first, so that the smaller ones find the memory that it took."""

    def __init__(
        self, sizes: Sequence[int], memory: GraphMemory, forward: ForwardPass, sampler: DeviceSampler, attention: AttentionBackend
    ) -> None:
        self._sizes = sorted(sizes)
        self._memory, self._forward, self._sampler, self._attention = memory, forward, sampler, attention
        self._graphs: dict[int, DecodeGraph] = {}
        self._told: set[int] = set()  # sizes of graphs that know ids

    def capture(self, told: Callable[[int, int], None]) -> None:
        """told: after each graph, how many there are and will be."""
        for number, size in enumerate(reversed(self._sizes), 1):
            self._graphs[size] = self._captured(size)
            told(number, len(self._sizes))

    def release(self) -> None:
        self._graphs.clear()
        self._told.clear()
        self._attention.release_graphs()

    def for_rows(self, num_rows: int) -> DecodeGraph | None:
        """The smallest that holds so many, None if there is none."""
        place = bisect_left(self._sizes, num_rows)
        return self._graphs.get(self._sizes[place]) if num_rows > 0 and place < len(self._sizes) else None

    def tell(self, graph: DecodeGraph, known: Tensor | None) -> None:
        """On the forward stream, before the replay. known: int32[size]; None: all ids are relayed."""
        if known is not None:
            graph.known.copy_(known)
            self._told.add(graph.size)
        elif graph.size in self._told:
            graph.known.fill_(-1)
            self._told.discard(graph.size)

    def _captured(self, size: int) -> DecodeGraph:
        columns = StepColumns.idle(self._forward.capacity, size)
        words = torch.from_numpy(columns.words()).to(self._forward.device)
        device = DeviceColumns.of(words, size)
        ids, rows = self._forward.fresh_rows(columns, device)
        known = torch.full((size,), -1, dtype=torch.int32, device=self._forward.device)
        sampled = min(size, self._sampler.max_slots)
        space = self._sampler.fixed_space(device.sample_slots[:sampled], device.sample_positions[:sampled])
        self._attention.plan(AttentionBatch(columns.starts, columns.num_tokens, 0, rows, graph=size))
        computed: list[Tensor] = []

        def forward() -> None:
            self._forward.run(ids, rows, columns, None, known)
            computed[:] = [self._forward.all_logits(sampled)]

        forward_graph = self._memory.capture(forward)
        logits = computed[0]
        sample_graph = self._memory.capture(lambda: self._sampler.run_kernels(logits, space))
        return DecodeGraph(size, words, known, ids, rows, space, logits, forward_graph, sample_graph)
