"""The contract of attention back ends, and a back end whose kernels need no plan.

plan() is called before each forward pass, and attend() once per layer during the pass. Neither waits for a GPU, because plan()
gets the lengths of rows on the host. There is one exception: the back end `torch` reads lengths from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows, ScoreRule

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of a model's attention, and the limits of all its steps."""

    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # elements per head of queries and keys
    value_dim: int  # elements per head of values
    page_size: int  # tokens
    windows: tuple[int, ...]  # distinct sliding windows of the layers, in tokens; 0 for no window
    max_rows: int  # largest number of rows of one step
    max_tokens: int  # largest number of tokens that one step computes
    max_context: int  # largest number of tokens that one row attends to
    max_pages: int  # largest number of pages of all rows of one step together
    separate_windows: bool = False  # whether windowed layers have a page table of their own, RaggedRows.window_table
    has_softcap: bool = False  # whether scores have a cap, ScoreRule.softcap
    has_sinks: bool = False  # whether heads have sinks, ScoreRule.sinks


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The lengths of one step's R rows on the host, and the columns of these rows on the device. Extend rows come first.

    A row whose slot is below 0 is padding: it has start 0 and one token, and its output is undefined.
    """

    starts: I32  # [R], on the host
    num_tokens: I32  # [R], on the host; 1 for rows after the extend rows
    num_extend: int  # number of extend rows
    rows: RaggedRows  # the same rows on the device, with page table and slots
    # Number of rows, padding included, of the graph that this step replays or is captured into; 0 for no graph. With a graph, R
    # is this number, num_extend is 0, and `rows` has the same addresses in all steps.
    graph: int = 0

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.num_tokens), "each row has a start and a number of tokens"
        assert 0 <= self.num_extend <= len(self.starts), "there are at most as many extend rows as rows"
        assert not self.graph or (self.graph == len(self.starts) and not self.num_extend), (
            "a graph has only decode rows, padded to its size"
        )


class AttentionBackend(Protocol):
    """Attention of one model. All calls use one stream."""

    name: str  # name of the back end in logs
    captures: bool  # whether decode steps can be captured in CUDA graphs

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares the next forward pass. The plan is valid until the next call of plan().

        plan() launches its copies and kernels on the current stream, and is never captured. For a graph, it is called before the
        capture and before each replay, and fills the buffers that the captured kernels read.
        """

    def attend(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
        """Computes Kernels.paged_attention for the planned batch. The step's keys and values must already be in the pools.

        Args:
            rows: the rows of the planned batch.
            rule: its window is one of the shape's windows. It has a cap or sinks only if the shape has them.
        """

    def release_graphs(self) -> None:
        """Frees the buffers of captured graphs. No graph is replayed afterwards."""


OURS = "kernels"


class KernelAttention:
    """An AttentionBackend without plans, which calls Kernels.paged_attention.

    On a CPU, it calls the kernels of the model's layers. For the back end `torch`, it calls the reference kernels. For a model of
    transformers' code, it is a placeholder, because the layers of such a model call attention directly.
    """

    captures = False

    def __init__(self, kernels: Kernels, name: str = OURS) -> None:
        self.name = name
        self._kernels = kernels

    def plan(self, batch: AttentionBatch) -> None:
        """Does nothing. Raises ValueError for a batch of a graph, because attend() reads lengths on the host."""
        if batch.graph:
            raise ValueError(
                f"attention back end {self.name} cannot be captured in a graph, because it reads row lengths on the host"
            )

    def attend(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
        self._kernels.paged_attention(out, q, k_pool, v_pool, rows, rule)

    def release_graphs(self) -> None:
        """Does nothing, because there are no graphs."""
