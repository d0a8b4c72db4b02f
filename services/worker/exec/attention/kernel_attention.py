"""Attention by kernels that read the rows' lengths themselves. They need no plan and support no graphs."""

from __future__ import annotations

from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.attention.backend import AttentionBatch

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
