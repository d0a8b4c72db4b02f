"""Decides the form of every matrix of a model: elements of 16 or 32 bits, codes of the checkpoint, or codes computed at load.

A folder without codes can be quantized while it is loaded: int8 with a scale per output channel, or int4 with a scale per group.
The classes in exec/weights/layouts read the codes of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import GROUPS, CodedWeight, Matrix, Scheme, stacked
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError

AUTO, INT8, INT4 = "auto", "int8", "int4"  # values of QuantizationOptions.weights
CONVERTED_AT_ONCE = 1 << 22  # elements that are converted to float32 at a time: 16 MiB
Part = tuple[str, tuple[int, ...]]  # name of a tensor in the checkpoint, and its shape


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """The worker's settings quantization and quantize_head."""

    weights: str = AUTO  # AUTO: no matrix is quantized at load; INT8, INT4
    head: bool = False  # whether the vocabulary projection gets 8 bits


FROM_CHECKPOINT = QuantizationOptions()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint with a part of a matrix: elements, codes, scales, zero points or the order of its inputs."""

    name: str
    shape: tuple[int, ...]
    # float32: any float, converted to float32. None: any float, converted to the model dtype. Others: the dtype in the file.
    dtype: torch.dtype | None = None

    @property
    def is_float(self) -> bool:
        """Whether the file may have any float of 16 or 32 bits."""
        return self.dtype in (None, torch.float32)


class Layout(Protocol):
    """The layout of a quantized checkpoint: the tensors of a matrix, and their meaning.

    The constructor takes a config for which quantization_config.fault_of() finds no fault.
    """

    @property
    def name(self) -> str:
        """Name for logs and responses, such as "awq 4 bits by 128"."""

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        """Returns the tensors of a matrix. Empty if the checkpoint has its elements.

        Args:
            name: name that the tensor of elements would have, such as "model.layers.0.mlp.up_proj.weight".
            shape: its shape, [N, K], or [E, N, K] if it has all experts of a layer.

        Raises:
            CheckpointError: the layout does not support the shape. The message names the tensor.
        """

    def matrix(self, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Matrix:
        """Returns the matrix [N, K]. A float result may have any dtype.

        Args:
            tensors: the tensors that tensors() names, on any device.

        Raises:
            CheckpointError: a value is wrong. The message names the tensor.
        """


@dataclass(frozen=True, slots=True)
class Quantization:
    """The form of all matrices of one model."""

    options: QuantizationOptions = FROM_CHECKPOINT
    layout: Layout | None = None  # layout of a quantized checkpoint; None for other checkpoints

    def __str__(self) -> str:
        """The layout and the options for logs and responses, such as "awq 4 bits by 128". Empty without both."""
        parts = [] if self.layout is None else [self.layout.name]
        parts += [self.options.weights] * (self.options.weights != AUTO)
        return ", ".join([*parts, "int8 head"] if self.options.head else parts)

    def tensors(self, part: Part) -> tuple[StoredTensor, ...]:
        """Returns the tensors of codes of a matrix. Empty if the checkpoint has its elements. Raises CheckpointError."""
        return () if self.layout is None else self.layout.tensors(*part)

    def decoded(self, parts: Sequence[Part], tensors: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Matrix:
        """Returns the output channels of all parts as one matrix.

        Args:
            tensors: for each part, the tensors that tensors() names, or one tensor with its elements.

        Raises:
            CheckpointError: a tensor is wrong, or the parts have different schemes.
        """
        matrices = [self._decoded(part, each) for part, each in zip(parts, tensors, strict=True)]
        coded = [each for each in matrices if isinstance(each, CodedWeight)]
        try:
            if len(coded) == len(matrices):
                return stacked(coded)
        except ValueError as error:
            raise CheckpointError(f"{_names(parts)} are one matrix, but {error}") from error
        plain = [each.to(dtype) for each in matrices if isinstance(each, Tensor)]
        if coded:
            raise CheckpointError(f"{_names(parts)} are one matrix, but only {len(coded)} of them have codes")
        return plain[0] if len(plain) == 1 else torch.cat(plain)

    def _decoded(self, part: Part, tensors: Sequence[Tensor]) -> Matrix:
        if self.layout is None or not self.layout.tensors(*part):
            return tensors[0]
        return self.layout.matrix(*part, tensors)

    def applied(self, name: str, matrix: Matrix, is_head: bool) -> Matrix:
        """Returns the matrix in the form that kernels pack: with codes, if the options demand them.

        Args:
            name: name of the first tensor of the matrix.
            is_head: whether it is the vocabulary projection.

        Raises:
            CheckpointError: the depth does not fit the scheme, an element is not finite, or the options demand 8 bits for a
                head with codes.
        """
        if isinstance(matrix, CodedWeight):
            if is_head and self.options.head:
                raise CheckpointError(f"{name} has {matrix.scheme} in the checkpoint already. Unset --quantize-head.")
            return matrix
        if matrix.is_meta:
            return matrix
        head = INT8 if self.options.head else AUTO
        scheme = _scheme(head if is_head else self.options.weights, name, matrix.shape[1])
        return matrix if scheme is None else quantized(name, matrix, scheme)


UNQUANTIZED = Quantization()


def _names(parts: Sequence[Part]) -> str:
    return " and ".join(name for name, _ in parts)


def _scheme(option: str, name: str, depth: int) -> Scheme | None:
    """Returns the scheme of a matrix that is quantized at load. Raises CheckpointError if no group divides the depth."""
    if option == AUTO:
        return None
    if option == INT8:
        return Scheme(8)
    group = next((group for group in reversed(GROUPS) if depth % group == 0), 0)
    if not group:
        groups = ", ".join(map(str, GROUPS))
        raise CheckpointError(
            f"{name} has a depth of {depth}, which no group of int4 divides ({groups}). Set --quantization to int8."
        )
    return Scheme(4, group)


def quantized(name: str, weight: Tensor, scheme: Scheme) -> CodedWeight:
    """Returns the codes of a matrix [N, K], symmetric around 0, computed for some output channels at a time.

    The element of the largest magnitude in a group gets the number (code - zero point) of the largest magnitude: -8 with 4 bits,
    127 or -127 with 8 bits. A scale of 4 bits may be negative, and is rounded to bfloat16 before the codes are computed.

    Raises:
        CheckpointError: the depth does not fit the scheme, or an element is not finite.
    """
    channels, depth = weight.shape
    try:
        groups = scheme.groups_of(depth)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be quantized: {error}") from error
    codes = torch.empty((channels, depth), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((channels, groups), dtype=torch.float32, device=weight.device)
    step = max(1, CONVERTED_AT_ONCE // depth)
    for first in range(0, channels, step):
        wide = weight[first : first + step].float().view(-1, groups, depth // groups)
        if scheme.bits == 4:
            extremes = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
            scale = (extremes / -8.0).bfloat16().float()
            low, high = -8, 7
        else:
            scale = wide.abs().amax(-1, keepdim=True) / 127.0
            low, high = -127, 127
        rounded = (wide / torch.where(scale == 0, 1.0, scale)).round_().clamp_(low, high).add_(scheme.zero)
        codes[first : first + step] = rounded.view(-1, depth).to(torch.uint8)
        scales[first : first + step] = scale.squeeze(-1)
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{name} cannot be quantized: it has elements that are not finite")
    return CodedWeight(codes, scales, None, scheme)
