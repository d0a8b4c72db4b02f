"""Declares weights that are stored as codes of 8 or 4 bits: their scheme, and a matrix of codes before kernels pack it.

An element is (code - zero point) * scale, or table[code] * scale if the scheme has a table. The elements of a group share a scale
and a zero point. A group is a run of consecutive elements of an output channel, or the whole channel.

Letters in shapes: N output channels, K elements per channel (the depth), C groups per channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUPS = (32, 64, 128)  # supported sizes of a group
DEPTH_STEP = 8  # the depth of a coded weight is a multiple of this number
MAX_DEPTH = 1 << 16  # largest number of elements in a group; the sum of 2^16 products of two codes of 8 bits fits into int32
TABLE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Scheme:
    """The meaning of the codes of a weight. The constructor raises ValueError for a scheme that no kernel reads."""

    bits: int  # 8 or 4
    group: int = 0  # elements of a group; 0: the group is a whole output channel
    zero_points: bool = False  # whether each group has its own zero point; if not, the zero point is 2^(bits - 1)
    table: tuple[int, ...] | None = None  # number for each of the 16 codes, -127 to 127; None: numbers are code - zero point

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"weights of {self.bits} bits are not supported; supported: 8 and 4")
        if self.group and self.group not in GROUPS:
            raise ValueError(f"groups of {self.group} elements are not supported; supported: {', '.join(map(str, GROUPS))}")
        if self.table is None:
            return
        if self.bits != 4 or self.zero_points or len(self.table) != TABLE_SIZE or max(map(abs, self.table)) > 127:
            raise ValueError(f"a table has {TABLE_SIZE} numbers from -127 to 127, for codes of 4 bits without zero points")

    @property
    def zero(self) -> int:
        """Zero point of all groups of a scheme that stores no zero points and has no table."""
        return 1 << (self.bits - 1)

    def groups_of(self, depth: int) -> int:
        """Returns the number of groups of a channel. Raises ValueError if the scheme does not fit the depth."""
        if depth % (self.group or DEPTH_STEP):
            raise ValueError(f"a depth of {depth} is not a multiple of {self.group or DEPTH_STEP}, as {self} requires")
        if (self.group or depth) > MAX_DEPTH:
            raise ValueError(f"a depth of {depth} is larger than {MAX_DEPTH}, the largest depth of a channel with one scale")
        return depth // self.group if self.group else 1

    def __str__(self) -> str:
        kind = f"int{self.bits}" if self.table is None else "4-bit table"
        scales = f"by {self.group}" if self.group else "by channel"
        return f"{kind} {scales}{' with zero points' if self.zero_points else ''}"


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A matrix [N, K] of codes. The loader of a model creates it, and kernels pack it."""

    codes: Tensor  # uint8[N, K], one code per element, also for 4 bits
    scales: Tensor  # float32[N, C]
    zeros: Tensor | None  # uint8[N, C]; None if the scheme has no zero points
    scheme: Scheme
    order: Tensor | None = None  # int64[K]: element k multiplies input order[k] (act-order); None: element k multiplies input k

    def __post_init__(self) -> None:
        channels, depth = self.codes.shape
        shape = (channels, self.scheme.groups_of(depth))
        fits = self.scales.shape == shape and (self.zeros is not None) == self.scheme.zero_points
        if not fits or (self.zeros is not None and self.zeros.shape != shape):
            raise ValueError(f"scales of shape {tuple(self.scales.shape)} do not fit codes {channels} x {depth} of {self.scheme}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, index: Tensor) -> CodedWeight:
        """Returns the output channels `index`, int64[n]."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], zeros=zeros)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantizes the matrix to [N, K], with its columns in the order of the inputs."""
        elements = dequantized(self.codes, self.scales, self.zeros, self.scheme).to(dtype)
        return elements if self.order is None else elements[:, torch.argsort(self.order)]

    def without_zeros(self) -> CodedWeight:
        """Returns the weight without stored zero points, all of which must equal Scheme.zero."""
        return replace(self, zeros=None, scheme=replace(self.scheme, zero_points=False))

    def with_zeros(self) -> CodedWeight:
        """Returns the weight with a stored zero point for each group."""
        if self.zeros is not None:
            return self
        zeros = torch.full(self.scales.shape, self.scheme.zero, dtype=torch.uint8, device=self.device)
        return replace(self, zeros=zeros, scheme=replace(self.scheme, zero_points=True))


Matrix = Tensor | CodedWeight  # the weight of a linear layer, [N, K], before kernels pack it


def dequantized(codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """Dequantizes some output channels to float32[n, K].

    Args:
        codes: uint8[n, K].
        scales: [n, C].
        zeros: uint8[n, C], or None.
    """
    channels, depth = codes.shape
    grouped = codes.reshape(channels, scales.shape[1], -1)
    if scheme.table is not None:
        table = torch.tensor(scheme.table, dtype=torch.float32, device=codes.device)
        values = table[grouped.int()]
    else:
        values = grouped.float() - (scheme.zero if zeros is None else zeros.float()[..., None])
    return (values * scales.float()[..., None]).view(channels, depth)


def compact_scales(scales: Tensor) -> Tensor:
    """Returns float32 scales as bfloat16 if this changes no scale. Kernels then read half as many bytes of scales."""
    narrow = scales.bfloat16()
    return narrow if torch.equal(narrow.float(), scales) else scales


def stacked(parts: Sequence[CodedWeight]) -> CodedWeight:
    """Returns the output channels of all parts as one weight. Raises ValueError if their schemes or input orders differ.

    If only some parts have zero points, the other parts get zero points equal to Scheme.zero.
    """
    if any(part.scheme.zero_points for part in parts) and all(part.scheme.table is None for part in parts):
        parts = [part.with_zeros() for part in parts]
    first = parts[0]
    if any(part.scheme != first.scheme for part in parts):
        raise ValueError(f"the schemes differ: {', '.join(str(part.scheme) for part in parts)}")
    if len(parts) == 1:
        return first
    orders = [part.order for part in parts if part.order is not None]
    if orders and (len(orders) < len(parts) or any(not torch.equal(order, orders[0]) for order in orders)):
        raise ValueError("the orders of their inputs differ")
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return CodedWeight(codes, scales, zeros, first.scheme, first.order)


def selected_rows(weight: Matrix, index: Tensor) -> Matrix:
    """Returns the output channels `index`, int64[n], of a matrix."""
    at = index.to(weight.device)
    return weight.rows(at) if isinstance(weight, CodedWeight) else torch.index_select(weight, 0, at)
