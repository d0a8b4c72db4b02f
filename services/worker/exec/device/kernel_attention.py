"""The attention of a model that is not ours: its layers call the kernels themselves, so that there is nothing to plan."""

from __future__ import annotations

from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.attention.backend import AttentionBatch


class KernelAttention:
    """Implements AttentionBackend. Such models are not captured: their code may look at values."""

    name = "kernels"
    captures = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def plan(self, batch: AttentionBatch) -> None:
        return

    def attend(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        self._kernels.paged_attention(out, qkv, k_pool, v_pool, rows, scale, window)

    def release_graphs(self) -> None:
        return
