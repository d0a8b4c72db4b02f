"""Reads weights in MXFP4 (OCP Microscaling Formats 1.0): numbers E2M1 of 4 bits. 32 numbers share a power of 2 as scale.

A matrix NAME [N, K] has NAME_blocks uint8[N, K / 32, 16], with the first number of a byte in its lower half, and NAME_scales
uint8[N, K / 32], exponents with an offset of 127. The matrices of all experts of a layer have one more dimension before N.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Matrix, Scheme
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError
from rootstock_llm.services.worker.exec.weights.quantization import StoredTensor

GROUP = 32
# Twice the numbers of E2M1, which makes them integers. matrix() halves the scales.
SCHEME = Scheme(4, GROUP, table=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
OFFSET, NOT_A_NUMBER = 127, 255  # offset of the exponents, and the exponent of a scale that is NaN


class Mxfp4:
    """Implements Layout. matrix() returns a tensor of experts [E, N, K] as one matrix [E N, K]."""

    name = "mxfp4"

    def __init__(self, quantization: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        module = name.removesuffix(".weight")
        if not self._checkpoint.has(f"{module}_blocks"):
            return ()
        *channels, depth = shape
        if depth % GROUP:
            raise CheckpointError(f"{name} has a depth of {depth}, which is not a multiple of {GROUP}")
        return (
            StoredTensor(f"{module}_blocks", (*channels, depth // GROUP, GROUP // 2), torch.uint8),
            StoredTensor(f"{module}_scales", (*channels, depth // GROUP), torch.uint8),
        )

    def matrix(self, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Matrix:
        blocks, exponents = tensors
        if bool((exponents == NOT_A_NUMBER).any()):
            raise CheckpointError(f"{name} has scales that are not finite")
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1)
        scales = torch.exp2(exponents.float() - OFFSET - 1)
        channels = math.prod(shape[:-1])
        return CodedWeight(codes.view(channels, -1), scales.view(channels, -1), None, SCHEME)
