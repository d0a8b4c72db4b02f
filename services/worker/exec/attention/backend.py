"""The contract of attention back ends on a GPU. plan() comes before each forward pass, attend() once per layer within it.

Nothing here waits for the device: lengths are known on the host, values never are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.ops import RaggedRows

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all steps of a model have in common. windows: the distinct sliding windows of its layers, 0 for none.

    page_size: tokens. max_rows, max_tokens: of one step. max_context: tokens of one row. max_pages: of all rows of one step
    together.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    windows: tuple[int, ...]
    max_rows: int
    max_tokens: int
    max_context: int
    max_pages: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's lengths on the host, and its columns on the device.

    starts, num_tokens: int32[R] on the host; extend rows first, num_extend of them, then rows of one token. rows: the same on
    the device, with page table and slots; a slot below 0 is padding: start 0, one token, its output is undefined.
    graph: 0, or the padded number of rows of the captured graph that this step is captured into or replays; then R is that
    number, num_extend is 0, and the addresses in rows are those of all steps of that graph.
    """

    starts: I32
    num_tokens: I32
    num_extend: int
    rows: RaggedRows
    graph: int = 0

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.num_tokens), "columns of one length"
        assert 0 <= self.num_extend <= len(self.starts), "extend rows are the first of all rows"
        assert not self.graph or (self.graph == len(self.starts) and not self.num_extend), "a graph's rows decode"


class AttentionBackend(Protocol):
    """One model's, on one stream at a time. captures: decode steps can be captured in CUDA graphs."""

    name: str
    captures: bool

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares the pass that follows; launched on the current stream, outside of capture, before capture and before each
        replay. With batch.graph the buffers that the captured kernels read are filled for this step. Holds until the next."""

    def attend(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        """Kernels.paged_attention for the planned batch; rows: those of the plan. The pools hold the step's keys and values."""

    def release_graphs(self) -> None:
        """Forgets what captured graphs read; they are not replayed again."""
