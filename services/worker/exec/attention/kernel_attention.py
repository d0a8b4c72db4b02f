"""Attention in plain torch: runs anywhere, row by row, and waits for the device to tell it the lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from kernels.reference import layers as reference
from services.worker.exec.attention.backend import AttentionBatch, AttentionShape


class TorchAttention:
    """An AttentionBackend without graphs."""

    name = "torch"
    captures = False

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """Nothing of either is needed."""

    def plan(self, batch: AttentionBatch) -> None:
        """Raises ValueError for a batch of a graph: lengths are read while attend() runs."""
        if batch.graph:
            raise ValueError("attention in plain torch cannot be captured in a graph")

    def attend(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        reference.paged_attention(out, qkv, k_pool, v_pool, rows, scale, window)

    def release_graphs(self) -> None:
        """There are none."""
