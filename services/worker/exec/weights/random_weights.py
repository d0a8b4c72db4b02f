"""Decoder weights of random values, made on the device: real shapes without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels
from services.worker.exec.weights.families import DecoderConfig
from services.worker.exec.weights.weights import DecoderWeights, Part, assemble

STD = 0.02  # what most checkpoints are initialised with


class RandomTensors:
    """A TensorSource: norms are ones, the rest is normal with mean 0 and STD."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.stacked([(name, shape)])

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        name, shape = parts[0]
        rows = sum(part[0] for _, part in parts)
        values = torch.empty((rows, *shape[1:]), dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return values.fill_(1.0)
        return values.normal_(0.0, STD, generator=self._generator)


def random_decoder_weights(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, kernels: Kernels, seed: int
) -> DecoderWeights:
    """The structure that a checkpoint of this config gives. The same seed gives the same values on the same device."""
    return assemble(RandomTensors(dtype, torch.device(device), seed), config, "", kernels)
