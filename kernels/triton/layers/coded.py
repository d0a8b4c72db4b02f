"""Multiplies by weights of 8 or 4 bits per element. A program converts the codes of a block to integers.

The integers, code - zero point or table[code], are exact in every model dtype. The sums of a group are multiplied by its scale in
float32. linear() has fixed block sizes and adds the groups in order, so that the bits of a row do not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import PackedLinear, misfit, require_contiguous
from rootstock_llm.kernels.reference.coded import in_order
from rootstock_llm.kernels.triton.attention.attention_block import dot
from rootstock_llm.kernels.triton.launch import begin_next, chained, wait_for_last

BLOCK_M, BLOCK_N, BLOCK_K = 32, 64, 32  # rows, columns and depth of a block; BLOCK_K divides each size in GROUPS


@triton.jit
def _numbers(codes, zeros, table, HAS_TABLE: tl.constexpr, KIND: tl.constexpr):
    """Returns codes - zeros, or the numbers that the table has for the codes, [N, K], in dtype KIND."""
    if HAS_TABLE:
        return tl.load(table + codes.to(tl.int32)).to(tl.float32).to(KIND)
    else:
        return (codes.to(tl.int32) - zeros[:, None]).to(tl.float32).to(KIND)


@triton.jit
def coded_sums(
    x_at,  # pointers to rows of DEPTH elements, [M, 1]
    rows_in,  # whether each row exists, [M]
    w_rows,  # int64[N], channels of the weight
    codes,  # uint8[channels, DEPTH]; [channels, DEPTH / 2] with HALVES, the first code of a byte in its lower half
    scales,  # [channels, C], C = DEPTH / GROUP
    zeros,  # uint8[channels, C]; without HAS_ZEROS, any pointer
    table,  # int8[16]; without HAS_TABLE, any pointer
    KIND: tl.constexpr,  # dtype of x
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,  # zero point of all groups, without HAS_ZEROS
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    UPCAST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Returns the products of M rows and N channels, float32[M, N]."""
    total = tl.zeros([M, N], dtype=tl.float32)
    for group in range(0, DEPTH // GROUP):
        group_zeros = tl.full([N], ZERO, dtype=tl.int32)
        if HAS_ZEROS:
            group_zeros = tl.load(zeros + w_rows * (DEPTH // GROUP) + group).to(tl.int32)
        sums = tl.zeros([M, N], dtype=tl.float32)
        for begin in range(0, GROUP, K):
            first = group * GROUP + begin
            if HALVES:
                pairs = first // 2 + tl.arange(0, K // 2)
                both = tl.load(codes + w_rows[:, None] * (DEPTH // 2) + pairs[None, :], mask=2 * pairs[None, :] < DEPTH, other=0)
                inside = rows_in[:, None] & (2 * pairs[None, :] < DEPTH)
                even = tl.load(x_at + 2 * pairs[None, :], mask=inside, other=0.0)
                odd = tl.load(x_at + 2 * pairs[None, :] + 1, mask=inside, other=0.0)
                sums = dot(even, tl.trans(_numbers(both & 15, group_zeros, table, HAS_TABLE, KIND)), sums, UPCAST)
                sums = dot(odd, tl.trans(_numbers(both >> 4, group_zeros, table, HAS_TABLE, KIND)), sums, UPCAST)
            else:
                depths = first + tl.arange(0, K)
                deep = depths < DEPTH
                values = tl.load(x_at + depths[None, :], mask=rows_in[:, None] & deep[None, :], other=0.0)
                numbers = tl.load(codes + w_rows[:, None] * DEPTH + depths[None, :], mask=deep[None, :], other=0)
                sums = dot(values, tl.trans(_numbers(numbers, group_zeros, table, HAS_TABLE, KIND)), sums, UPCAST)
        scale = tl.load(scales + w_rows * (DEPTH // GROUP) + group).to(tl.float32)
        total += sums * scale[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _coded_kernel(
    out,  # [T, WIDTH]
    x,  # [T, DEPTH]
    codes,  # see coded_sums()
    scales,
    zeros,
    table,
    bias,  # [WIDTH]; without HAS_BIAS, any pointer
    num_rows,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin_next(CHAINED)
    columns = tl.program_id(0) * N + tl.arange(0, N)
    columns_in = columns < WIDTH
    w_rows = tl.where(columns_in, columns, 0).to(tl.int64)
    rows = tl.program_id(1) * M + tl.arange(0, M)
    rows_in = rows < num_rows
    x_at = x + rows.to(tl.int64)[:, None] * DEPTH
    wait_for_last(CHAINED)
    total = coded_sums(
        x_at, rows_in, w_rows, codes, scales, zeros, table, x.dtype.element_ty, DEPTH, GROUP, ZERO, HALVES, HAS_ZEROS, HAS_TABLE,
        UPCAST, M, N, K,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + w_rows).to(tl.float32)[None, :]
    at = out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=rows_in[:, None] & columns_in[None, :])


@dataclass(frozen=True, slots=True)
class CodedOperands:
    """The arguments of a kernel that describe a weight. A weight without codes has pointers that are not read."""

    pointers: tuple[Tensor, Tensor, Tensor]  # scales, zero points, table
    options: dict[str, int]  # GROUP, 0 without codes; ZERO, HALVES, HAS_ZEROS, HAS_TABLE


class CodedWeights:
    """Describes weights for kernels. Owns the tables of their schemes on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[int, ...], Tensor] = {}  # tables of schemes as int8[16]

    def operands(self, weight: PackedLinear) -> CodedOperands:
        """Returns the arguments that describe a weight. The first call with a table copies it, and must not be captured."""
        scheme, scales, zeros, unread = weight.scheme, weight.scales, weight.zeros, weight.data
        if scheme is None or scales is None:
            options = {"GROUP": 0, "ZERO": 0, "HALVES": False, "HAS_ZEROS": False, "HAS_TABLE": False}
            return CodedOperands((unread, unread, unread), options)
        options = {
            "GROUP": scheme.group or weight.in_features,
            "ZERO": scheme.zero,
            "HALVES": scheme.bits == 4,
            "HAS_ZEROS": zeros is not None,
            "HAS_TABLE": scheme.table is not None,
        }
        table = unread if scheme.table is None else self._table(scheme.table)
        return CodedOperands((scales, unread if zeros is None else zeros, table), options)

    def _table(self, table: tuple[int, ...]) -> Tensor:
        if table not in self._tables:
            self._tables[table] = torch.tensor(table, dtype=torch.int8, device=self._device)
        return self._tables[table]

    def linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        """Implements Kernels.linear() for a weight with codes. See operands().

        Raises:
            ValueError: the shapes do not fit, or the output has neither x's dtype nor float32.
        """
        rows, depth = x.shape
        if weight.packed or depth != weight.in_features or out.shape != (rows, weight.out_features):
            raise misfit(out, x, weight.data)
        if out.dtype not in (x.dtype, torch.float32):
            raise misfit(out, x, weight.data)
        x = in_order(x, weight)
        operands = self.operands(weight)
        require_contiguous(out, x, weight.data, operands.pointers[0])
        if rows == 0:
            return
        _coded_kernel[triton.cdiv(weight.out_features, BLOCK_N), triton.cdiv(rows, BLOCK_M)](
            out,
            x,
            weight.data,
            *operands.pointers,
            out if weight.bias is None else weight.bias,
            rows,
            WIDTH=weight.out_features,
            DEPTH=depth,
            HAS_BIAS=weight.bias is not None,
            UPCAST=x.device.type == "cpu" and x.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
            M=BLOCK_M,
            N=BLOCK_N,
            K=BLOCK_K,
            num_warps=4,
            enable_fp_fusion=False,
            **operands.options,
            **chained(x.device),
        )
