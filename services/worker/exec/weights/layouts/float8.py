"""Reads weights in float8 (e4m3) with scales per block of 128 x 128, per output channel, or for the whole matrix.

DeepSeek-V3 (arXiv 2412.19437, section 3.3) and the method "fp8" of transformers have scales per block. A module has the tensors
weight float8[N, K] and weight_scale_inv [N / 128, K / 128]. With one scale for the whole matrix, it has weight_scale [1], or
weight_scale_inv [] from transformers. An element is the stored number times its scale. Static scales of activations are ignored,
because the result is a matrix of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import Matrix
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError
from rootstock_llm.services.worker.exec.weights.layouts.words import finite, sizes_of
from rootstock_llm.services.worker.exec.weights.quantization import StoredTensor

BLOCK = 128
SUFFIXES = ("_scale_inv", "_scale")  # endings of the name of a weight's scales


class Float8:
    """Implements Layout for the method "fp8"."""

    name = "fp8"

    def __init__(self, quantization: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        """Takes a config without faults, see quantization_config.fault_of()."""
        self._checkpoint = checkpoint

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        scale = next((each for ending in SUFFIXES if self._checkpoint.has(each := f"{name}{ending}")), None)
        if scale is None:
            return ()
        return StoredTensor(name, shape, torch.float8_e4m3fn), stored_scales(scale, shape, self._checkpoint.shape(scale))

    def matrix(self, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Matrix:
        return scaled(name, *tensors)


def stored_scales(name: str, shape: tuple[int, ...], found: tuple[int, ...], blocks: bool = True) -> StoredTensor:
    """Returns the tensor of scales of a matrix [N, K].

    Args:
        found: its shape in the checkpoint.
        blocks: whether a block of 128 x 128 may have a scale.

    Raises:
        CheckpointError: the weight is a tensor of experts, or the shape is not that of one scale, or of scales per channel or
            block.
    """
    channels, depth = sizes_of(name, shape)
    supported = [(), (1,), (channels, 1)]
    if blocks:
        supported.append((-(-channels // BLOCK), -(-depth // BLOCK)))
    if found not in supported:
        raise CheckpointError(
            f"{name} has shape {found}; a weight of {channels} x {depth} needs one of the shapes {supported} for its scales"
        )
    return StoredTensor(name, found, torch.float32)


def scaled(name: str, weight: Tensor, scales: Tensor) -> Tensor:
    """Returns the elements of a weight as float32[N, K]."""
    channels, depth = weight.shape
    factors = finite(name, scales)
    if factors.dim() == 2 and factors.shape != (channels, 1):
        factors = factors.repeat_interleave(BLOCK, 0)[:channels].repeat_interleave(BLOCK, 1)[:, :depth]
    return weight.float() * factors
