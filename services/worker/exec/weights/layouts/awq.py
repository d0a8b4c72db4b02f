"""Reads weights of AWQ (arXiv 2306.00978) in version "gemm" of AutoAWQ.

A module has qweight int32[K, N / 8], qzeros int32[K / group, N / 8] and scales [K / group, N]. From the lowest bits on, the eight
codes of a word are those of columns 0, 2, 4, 6, 1, 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Matrix
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint
from rootstock_llm.services.worker.exec.weights.layouts.words import finite, scheme_for, sizes_of, unpacked
from rootstock_llm.services.worker.exec.weights.quantization import StoredTensor

POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)  # position in its word of the code of each column, 0 to 7
BITS = 4


class Awq:
    """Implements Layout."""

    def __init__(self, quantization: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        """Takes a config without faults, see quantization_config.fault_of()."""
        self._checkpoint = checkpoint
        self._group = max(int(quantization.get("group_size") or 0), 0)

    @property
    def name(self) -> str:
        return f"awq {BITS} bits by {self._group or 'channel'}"

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        module = name.removesuffix(".weight")
        if not self._checkpoint.has(f"{module}.qweight"):
            return ()
        channels, depth = sizes_of(name, shape)
        count = scheme_for(name, BITS, self._group, True, shape).groups_of(depth)
        return (
            StoredTensor(f"{module}.qweight", (depth, channels // 8), torch.int32),
            StoredTensor(f"{module}.qzeros", (count, channels // 8), torch.int32),
            StoredTensor(f"{module}.scales", (count, channels), torch.float32),
        )

    def matrix(self, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Matrix:
        weights, zeros, scales = tensors
        scheme = scheme_for(name, BITS, self._group, True, shape)
        return CodedWeight(_columns(weights).t().contiguous(), finite(name, scales.t()), _columns(zeros).t(), scheme)


def _columns(words: Tensor) -> Tensor:
    """Returns the codes uint8[R, 8 W] of words int32[R, W] in the order of the columns."""
    return unpacked(words, BITS).view(len(words), -1, 8)[:, :, list(POSITIONS)].flatten(1)
