"""The contract of attention back ends, and the back end whose kernels need no plan.

plan() is called before each forward pass, attend() once per layer in it. Neither waits for the device. The host has the lengths
of rows and never reads tensor values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that all steps of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    windows: tuple[int, ...]  # distinct sliding windows of the layers, in tokens; 0 for no window
    max_rows: int  # rows of one step
    max_tokens: int  # tokens of one step
    max_context: int  # tokens of one row
    max_pages: int  # pages of all rows of one step


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The lengths of one step's R rows on the host, and its columns on the device. Extend rows come first.

    A slot below 0 is padding with start 0 and one token; its output is undefined.
    """

    starts: I32  # [R], on the host
    num_tokens: I32  # [R], on the host; 1 for rows after the extend rows
    num_extend: int
    rows: RaggedRows  # the same rows on the device, with page table and slots
    # Padded number of rows of the graph that this step replays or is captured into, 0 for no graph. In a graph, R is this number,
    # num_extend is 0, and `rows` has the same addresses for all steps.
    graph: int = 0

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.num_tokens), "columns of one length"
        assert 0 <= self.num_extend <= len(self.starts), "extend rows are the first of all rows"
        assert not self.graph or (self.graph == len(self.starts) and not self.num_extend), "a graph's rows decode"


class AttentionBackend(Protocol):
    """Attention of one model. All calls use one stream."""

    name: str
    captures: bool  # decode steps can be captured in CUDA graphs

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares the next forward pass. The plan is valid until the next call.

        It launches on the current stream and is never captured. For a graph, it is called before the capture and before each
        replay, and fills the buffers that the captured kernels read.
        """

    def attend(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        """Computes Kernels.paged_attention for the planned batch. The pools have the step's keys and values already.

        Args:
            rows: the rows of the planned batch.
        """

    def release_graphs(self) -> None:
        """Frees the buffers of captured graphs, which are not replayed again."""


OURS = "kernels"


class KernelAttention:
    """An AttentionBackend without plans.

    It has the kernels of the model's layers on a CPU and for models through transformers, whose layers call attention themselves.
    With `torch` as the attention back end, it has torch's twins.
    """

    captures = False

    def __init__(self, kernels: Kernels, name: str = OURS) -> None:
        self.name = name
        self._kernels = kernels

    def plan(self, batch: AttentionBatch) -> None:
        """Does nothing. Raises ValueError for a batch of a graph, because attend() reads lengths on the host."""
        if batch.graph:
            raise ValueError("attention that reads lengths on the host cannot be captured in a graph")

    def attend(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        self._kernels.paged_attention(out, qkv, k_pool, v_pool, rows, scale, window)

    def release_graphs(self) -> None:
        """Does nothing, because there are no graphs."""
