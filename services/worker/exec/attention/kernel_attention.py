"""Attention by the kernels themselves, which find lengths where the rows have them: nothing to plan, and no graphs."""

from __future__ import annotations

from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.attention.backend import AttentionBatch

OURS = "kernels"


class KernelAttention:
    """An AttentionBackend. kernels: those of the model's layers on a CPU, or of a model that is not ours, whose layers call
    them; torch's twins where these are asked for."""

    captures = False

    def __init__(self, kernels: Kernels, name: str = OURS) -> None:
        self.name = name
        self._kernels = kernels

    def plan(self, batch: AttentionBatch) -> None:
        """Raises ValueError for a batch of a graph: lengths are read while attend() runs."""
        if batch.graph:
            raise ValueError("attention that reads lengths on the host cannot be captured in a graph")

    def attend(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        self._kernels.paged_attention(out, qkv, k_pool, v_pool, rows, scale, window)

    def release_graphs(self) -> None:
        """There are none."""
