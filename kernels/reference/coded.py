"""Implements linear layers with weights of 8 or 4 bits in plain torch, and the rounding of activations to 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, compact_scales, unfolded
from rootstock_llm.kernels.contracts.ops import PackedLinear

MOST_ELEMENTS = 1 << 24  # elements that are unfolded at a time: 64 MiB of float32


def pack_coded(weight: CodedWeight, bias: Tensor | None) -> PackedLinear:
    """Returns the codes [N, K], or two codes of 4 bits per byte, [N, K / 2], with the first one in the lower half."""
    channels, depth = weight.shape
    codes = weight.codes.contiguous()
    if weight.scheme.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    scales, zeros = compact_scales(weight.scales.contiguous()), None if weight.zeros is None else weight.zeros.contiguous()
    return PackedLinear(codes, bias, depth, channels, False, weight.scheme, scales, zeros, weight.order)


def elements(weight: PackedLinear, first: int, end: int) -> Tensor:
    """Returns the elements of output channels first .. end - 1 as float32[n, K]."""
    assert weight.scheme is not None and weight.scales is not None, "the weight has codes"
    codes = weight.data[first:end]
    if weight.scheme.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    return unfolded(codes, weight.scales[first:end], None if weight.zeros is None else weight.zeros[first:end], weight.scheme)


def experts_in_one(parts: Sequence[PackedLinear], bias: Tensor | None) -> PackedLinear:
    """Returns the weights of all experts, with the expert as the first dimension of each tensor.

    Raises:
        ValueError: the experts have different schemes, or an order of their inputs.
    """
    first = parts[0]
    if any(part.scheme != first.scheme or part.order is not None for part in parts):
        raise ValueError("experts must have one scheme, without an order of their inputs (act-order)")
    scales = [part.scales for part in parts if part.scales is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        first,
        data=torch.stack([part.data for part in parts]),
        bias=bias,
        scales=compact_scales(torch.stack([each.float() for each in scales])) if scales else None,
        zeros=torch.stack(zeros) if zeros else None,
    )


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
    out.copy_(unfolded(codes, scales, None, weight.scheme))


def with_8_bits(x: Tensor, group: int) -> Tensor:
    """Returns x [T, K] as float32, rounded as kernels round it for integer products.

    Args:
        group: elements of a row that share a scale: their largest magnitude / 127. 0 for a whole row.
    """
    grouped = x.float().view(len(x), -1, group or x.shape[1])
    largest = grouped.abs().amax(-1, keepdim=True)
    factor = torch.full_like(largest, 127.0) / largest  # `127.0 / largest` would round twice
    codes = torch.where(largest > 1e-35, grouped * factor, 0.0).round()
    return (codes * (largest / 127.0)).view(x.shape)
