"""Implements linear layers with coded weights, and the rounding of activations to 8 bits, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Matrix, Scheme, compact_scales, dequantized
from rootstock_llm.kernels.contracts.ops import PackedLinear

PARTLY_CODED = "either all matrices of experts have codes, or none of them"
MOST_ELEMENTS = 1 << 24  # elements that are dequantized at a time: 64 MiB of float32


def pack_coded(weight: CodedWeight, bias: Tensor | None) -> PackedLinear:
    """Returns the weight with codes [N, K], or with two codes of 4 bits per byte, [N, K / 2], the first one in the lower half."""
    channels, depth = weight.shape
    codes = weight.codes.contiguous()
    if weight.scheme.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    scales, zeros = compact_scales(weight.scales.contiguous()), None if weight.zeros is None else weight.zeros.contiguous()
    return PackedLinear(codes, bias, depth, channels, False, weight.scheme, scales, zeros, weight.order)


def elements(weight: PackedLinear, first: int, end: int) -> Tensor:
    """Dequantizes output channels first .. end - 1 to float32[n, K]."""
    assert weight.scheme is not None and weight.scales is not None, "the weight has codes"
    codes = weight.data[first:end]
    if weight.scheme.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    return dequantized(codes, weight.scales[first:end], None if weight.zeros is None else weight.zeros[first:end], weight.scheme)


class CodedExperts:
    """Collects the packed codes of all experts of a layer, one expert after the other."""

    def __init__(self, count: int, allocate: Callable[[tuple[int, ...]], Tensor]) -> None:
        """
        Args:
            count: number of experts.
            allocate: allocates a tensor of uint8.
        """
        self._count, self._allocate = count, allocate
        self._data: Tensor | None = None  # codes of all experts
        self._parts: list[PackedLinear] = []  # weights of the added experts, without their codes

    def add(self, packed: PackedLinear) -> None:
        """Copies the packed weight of the next expert.

        Raises ValueError if its scheme differs from the first expert's in more than the zero points, or if it has an order.
        """
        if self._parts and _without_zeros(packed.scheme) != _without_zeros(self._parts[0].scheme):
            raise ValueError(f"experts must have one scheme, not {self._parts[0].scheme} and {packed.scheme}")
        if packed.order is not None:
            raise ValueError("an order of the inputs (act-order) is not supported for experts")
        if self._data is None:
            self._data = self._allocate((self._count, *packed.data.shape))
        self._data[len(self._parts)].copy_(packed.data)
        self._parts.append(replace(packed, data=self._data[:0]))

    def finished(self, bias: Tensor | None) -> PackedLinear:
        """Returns the weights of all experts. If only some have zero points, the others get zero points equal to Scheme.zero.

        Args:
            bias: packed biases of all experts.
        """
        parts, data = self._parts, self._data
        schemes = [part.scheme for part in parts if part.scheme is not None]
        scales = [part.scales for part in parts if part.scales is not None]
        assert data is not None and len(schemes) == len(scales) == self._count, "each expert was added, and has codes"
        scheme = next((each for each in schemes if each.zero_points), schemes[0])
        if len({each.dtype for each in scales}) > 1:
            scales = [each.float() for each in scales]
        zeros = None
        if scheme.zero_points:
            implied = torch.full(scales[0].shape, scheme.zero, dtype=torch.uint8, device=data.device)
            zeros = torch.stack([implied if part.zeros is None else part.zeros for part in parts])
        return replace(parts[0], data=data, bias=bias, scheme=scheme, scales=torch.stack(scales), zeros=zeros)


def coded_matrix(matrix: Matrix) -> CodedWeight:
    """Returns `matrix`. Raises ValueError if it has no codes: the matrices of the layer's other experts have codes."""
    if isinstance(matrix, Tensor):
        raise ValueError(PARTLY_CODED)
    return matrix


def plain_matrix(matrix: Matrix) -> Tensor:
    """Returns a matrix that must have no codes, as those of the layer's other experts. Raises ValueError if it has codes."""
    if not isinstance(matrix, Tensor):
        raise ValueError(PARTLY_CODED)
    return matrix


def _without_zeros(scheme: Scheme | None) -> Scheme | None:
    return None if scheme is None else replace(scheme, zero_points=False)


def expert_of(weight: PackedLinear, expert: int) -> PackedLinear:
    """Returns the weight of one expert, without its bias."""
    assert weight.scales is not None, "the experts have codes"
    zeros = None if weight.zeros is None else weight.zeros[expert]
    return replace(weight, data=weight.data[expert], bias=None, scales=weight.scales[expert], zeros=zeros)


def in_order(x: Tensor, weight: PackedLinear) -> Tensor:
    """Returns the inputs [T, K] in the order of the weight's elements."""
    return x if weight.order is None else torch.index_select(x, 1, weight.order)


def coded_linear(out: Tensor, x: Tensor, weight: PackedLinear) -> None:
    """Implements Kernels.linear() in float32, for some output channels at a time."""
    step, wide = max(1, MOST_ELEMENTS // weight.in_features), in_order(x, weight).float()
    for first in range(0, weight.out_features, step):
        end = min(first + step, weight.out_features)
        bias = None if weight.bias is None else weight.bias[first:end].float()
        out[:, first:end] = torch.nn.functional.linear(wide, elements(weight, first, end), bias)


def coded_embedding(out: Tensor, input_ids: Tensor, weight: PackedLinear) -> None:
    """Implements Kernels.embedding() for a scheme of 8 bits with a scale per channel."""
    assert weight.scheme is not None and weight.scales is not None, "the weight has codes"
    codes, scales = torch.index_select(weight.data, 0, input_ids), torch.index_select(weight.scales, 0, input_ids)
    out.copy_(dequantized(codes, scales, None, weight.scheme))


def with_8_bits(x: Tensor, group: int) -> Tensor:
    """Returns x [T, K] as float32, rounded as kernels round it for integer products.

    Args:
        group: number of elements of a row that share a scale, which is their largest magnitude / 127. 0 for a whole row.
    """
    grouped = x.float().view(len(x), -1, group or x.shape[1])
    largest = grouped.abs().amax(-1, keepdim=True)
    factor = torch.full_like(largest, 127.0) / largest  # `127.0 / largest` would round twice
    codes = torch.where(largest > 1e-35, grouped * factor, 0.0).round()
    return (codes * (largest / 127.0)).view(x.shape)
