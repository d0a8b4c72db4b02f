"""The tensors of a decoder in their final, fused layout on a device: allocated first, filled by others, then handed out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.exec.weights.checkpoint import CheckpointError
from services.worker.exec.weights.weights import Part


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor of the checkpoint belongs. into: its elements, flat and contiguous, a part of the fused tensor."""

    name: str
    shape: tuple[int, ...]
    into: Tensor


class Allocated:
    """A TensorSource of undefined contents. Remembers what has been asked for, once per name."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self.placements: list[Placement] = []
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.stacked([(name, shape)])

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        """Raises CheckpointError where the device has no room."""
        rows, rest = sum(shape[0] for _, shape in parts), parts[0][1][1:]
        try:
            fused = torch.empty((rows, *rest), dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            held = sum(tensor.nbytes for tensor in self.tensors.values())
            message = f"the weights do not fit on {self._device}: no room for {parts[0][0]} after {held >> 20} MiB of others"
            raise CheckpointError(message) from error
        self._remember(parts, fused)
        return fused

    def _remember(self, parts: Sequence[Part], fused: Tensor) -> None:
        self.tensors[parts[0][0]] = fused
        flat, first = fused.view(-1), 0
        for name, shape in parts:
            count = math.prod(shape)
            self.placements.append(Placement(name, shape, flat[first : first + count]))
            first += count


class Filled:
    """A TensorSource that hands out each tensor of an Allocated once, and keeps it no longer."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.stacked([(name, shape)])

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.pop(parts[0][0])
