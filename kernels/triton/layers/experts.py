"""Implements experts in Triton. Each row uses a few experts, and only their weights are read.

A pair is a row and one of its experts. The kernels run in this order:

1. `_group_kernel` sorts the pairs by expert. It has a program per expert, which counts and collects the expert's pairs.
2. `_gate_up_kernel` computes the activations of all pairs, in tiles of pairs of one expert.
3. `_down_kernel` computes the outputs of all pairs in the same tiles, in float32.
4. `_combine_kernel` adds the weighted outputs of each row in the order of its choices.

The number of launched programs depends only on the shapes, so that a CUDA graph can contain the launches. Programs without a tile
end at once.

Products have fixed blocks of the depth. In deterministic mode, no sum is fused with a product, as fusion differs between variants
of a kernel. A row's bits then do not depend on other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import PackedExperts, misfit, require_contiguous
from rootstock_llm.kernels.triton.attention.attention_block import dot
from rootstock_llm.kernels.triton.launch import begin_next, block_of, chained, take_turn, wait_for_last, warps_for
from rootstock_llm.kernels.triton.layers.coded import BLOCK_K as CODED_K
from rootstock_llm.kernels.triton.layers.coded import CodedWeights, coded_sums

FEW_IDS, IDS = 128, 1024  # pairs that a program of _group_kernel reads at a time: for few pairs, which fit at once, and for many
COLUMNS = 1024  # columns of a program of _combine_kernel


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def _group_kernel(order, counts, ids, num_pairs, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Writes the pairs of one expert to `order`, after those of experts with lower ids, and their number to `counts`."""
    take_turn(CHAINED)
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], dtype=tl.int32)
    equal = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        found = tl.load(ids + begin + lanes, mask=begin + lanes < num_pairs, other=0x7FFFFFFF)
        lower += (found < expert).to(tl.int32)
        equal += (found == expert).to(tl.int32)
    at = tl.sum(lower, 0)
    tl.store(counts + expert, tl.sum(equal, 0))
    for begin in range(0, num_pairs, BLOCK):
        found = tl.load(ids + begin + lanes, mask=begin + lanes < num_pairs, other=0x7FFFFFFF)
        own = (found == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(own, 0) - 1, begin + lanes, mask=own > 0)
        at += tl.sum(own, 0)


@triton.jit
def _tile_of(counts, tile, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns (expert, begin, count) of a tile.

    `begin` is the index in `order` of the tile's first pair, and `count` is the number of the expert's pairs from `begin` on. The
    expert is EXPERTS if the tile does not exist.
    """
    lanes = tl.arange(0, EXPERT_BLOCK)
    count = tl.load(counts + lanes, mask=lanes < EXPERTS, other=0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum(((ends <= tile) & (lanes < EXPERTS)).to(tl.int32), 0)
    skipped = (tile - tl.sum(tl.where(lanes < expert, tiles, 0), 0)) * BLOCK_M
    begin = tl.sum(tl.where(lanes < expert, count, 0), 0) + skipped
    return expert, begin, tl.sum(tl.where(lanes == expert, count, 0), 0) - skipped


@triton.jit
def _products(
    a_at,  # [BLOCK_M] pointers to the inputs of the pairs
    pairs_in,
    w_rows,  # [BLOCK_N] rows of the weight
    columns_in,
    weight,
    scales,  # for these three see coded_sums(); without a GROUP, any pointers
    zeros,
    table,
    bias,
    ELEMENT: tl.constexpr,  # dtype of the inputs
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,  # 0 for a weight without codes
    ZERO: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns the products of pairs and rows of the weight, with the biases, float32[BLOCK_M, BLOCK_N]."""
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if GROUP > 0:
        sums = coded_sums(
            a_at[:, None], pairs_in, w_rows, weight, scales, zeros, table, ELEMENT, DEPTH, GROUP, ZERO,
            HALVES, HAS_ZEROS, HAS_TABLE, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        w_at = weight + w_rows * DEPTH
        for first in range(0, DEPTH, BLOCK_K):
            depths = first + tl.arange(0, BLOCK_K)
            deep = depths < DEPTH
            a = tl.load(a_at[:, None] + depths[None, :], mask=pairs_in[:, None] & deep[None, :], other=0.0)
            b = tl.load(w_at[:, None] + depths[None, :], mask=columns_in[:, None] & deep[None, :], other=0.0)
            sums = dot(a, tl.trans(b), sums, UPCAST)
    if HAS_BIAS:
        sums += tl.load(bias + w_rows, mask=columns_in, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _gate_up_kernel(
    hidden,  # [P, INNER], in the order of `order`
    x,  # [T, WIDTH]
    weight,  # [EXPERTS, 2 INNER, WIDTH], the rows of the gate first; with a GROUP, codes
    scales,  # for these three see coded_sums(); without a GROUP, any pointers
    zeros,
    table,
    bias,  # [EXPERTS, 2 INNER]; without HAS_BIAS, any pointer
    order,
    counts,
    alpha,
    limit,
    shift,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # lanes; gate and up alternate
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # 0 for a weight without codes
    ZERO: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin_next(CHAINED)
    wait_for_last(CHAINED)
    expert, begin, count = _tile_of(counts, tl.program_id(1), EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if expert < EXPERTS:
        lanes = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        columns_in = lanes // 2 < INNER
        w_rows = expert.to(tl.int64) * (2 * INNER) + tl.where(columns_in, lanes // 2 + lanes % 2 * INNER, 0)
        pairs = tl.arange(0, BLOCK_M)
        pairs_in = pairs < count
        rows = tl.load(order + begin + pairs, mask=pairs_in, other=0) // CHOICES
        x_at = x + rows.to(tl.int64) * WIDTH
        sums = _products(
            x_at, pairs_in, w_rows, columns_in, weight, scales, zeros, table, bias, x.dtype.element_ty, WIDTH, GROUP, ZERO,
            HALVES, HAS_ZEROS, HAS_TABLE, HAS_BIAS, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gate, up = tl.split(tl.reshape(sums, [BLOCK_M, BLOCK_N // 2, 2]))
        gate = tl.where(gate > limit, limit, gate)  # a NaN stays, as the comparison is false
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = (up + shift) * gate / (1.0 + tl.exp(-alpha * gate))
        columns = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at = hidden + (begin + pairs).to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(at, value.to(hidden.dtype.element_ty), mask=pairs_in[:, None] & (columns < INNER)[None, :])


@triton.jit
def _down_kernel(
    outputs,  # float32[P, WIDTH], by pair
    hidden,  # [P, INNER], in the order of `order`
    weight,  # [EXPERTS, WIDTH, INNER]; with a GROUP, codes
    scales,  # for these three see coded_sums(); without a GROUP, any pointers
    zeros,
    table,
    bias,  # [EXPERTS, WIDTH]; without HAS_BIAS, any pointer
    order,
    counts,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # 0 for a weight without codes
    ZERO: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin_next(CHAINED)
    wait_for_last(CHAINED)
    expert, begin, count = _tile_of(counts, tl.program_id(1), EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if expert < EXPERTS:
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        columns_in = columns < WIDTH
        w_rows = expert.to(tl.int64) * WIDTH + tl.where(columns_in, columns, 0)
        pairs = tl.arange(0, BLOCK_M)
        pairs_in = pairs < count
        a_at = hidden + (begin + pairs).to(tl.int64) * INNER
        sums = _products(
            a_at, pairs_in, w_rows, columns_in, weight, scales, zeros, table, bias, hidden.dtype.element_ty, INNER, GROUP, ZERO,
            HALVES, HAS_ZEROS, HAS_TABLE, HAS_BIAS, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        number = tl.load(order + begin + pairs, mask=pairs_in, other=0)
        at = outputs + number.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(at, sums, mask=pairs_in[:, None] & columns_in[None, :])


@triton.jit
def _combine_kernel(
    out, outputs, weights, CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    take_turn(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = row * CHOICES + choice
        total += tl.load(outputs + pair * WIDTH + columns, mask=inside, other=0.0) * tl.load(weights + pair)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of the products. The depth of a block must be the same for all numbers of rows."""

    m: int  # pairs of a block
    n: int  # columns of a block
    k: int  # elements of the depth of a block
    num_warps: int
    num_stages: int


MANY_PAIRS = 32  # average number of pairs of an expert above which blocks are large
FEW, MANY = Tile(16, 64, 64, 4, 4), Tile(64, 128, 64, 8, 3)
ORDERED = Tile(64, 64, 64, 4, 4)  # the only tile of deterministic mode, because another size may change the instruction


def tile_of(pairs: int, count: int, deterministic: bool) -> Tile:
    """Returns the tile of a call, which is the same for all numbers of pairs in deterministic mode.

    Args:
        pairs: number of pairs of a row and one of its experts.
        count: number of experts.
    """
    if deterministic:
        return ORDERED
    return MANY if pairs > MANY_PAIRS * count else FEW


def experts(
    out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts, coded: CodedWeights, deterministic: bool
) -> None:
    """Implements Kernels.experts().

    Allocates the order of the pairs, their hidden values, and their outputs, float32[P, N].

    Args:
        coded: describes weights with codes.
        deterministic: whether a row's bits depend only on that row.

    Raises:
        ValueError: the shapes do not fit.
    """
    gate_up, down, activation = packed.gate_up, packed.down, packed.activation
    require_contiguous(out, x, ids, weights, gate_up.data, down.data)
    (rows, width), choices, count = x.shape, ids.shape[1], packed.num_experts
    if out.shape != x.shape or width != gate_up.in_features or ids.shape != weights.shape or len(ids) != rows:
        raise misfit(out, x, ids, weights)
    is_typed = gate_up.scheme is not None or x.dtype == gate_up.data.dtype
    if not is_typed or (ids.dtype, weights.dtype) != (torch.int32, torch.float32) or gate_up.packed:
        raise misfit(out, x, ids, weights, gate_up.data)
    if not rows:
        return
    first, second = coded.operands(gate_up), coded.operands(down)
    inner, pairs = down.in_features, rows * choices
    tile = tile_of(pairs, count, deterministic)
    tiles = min(pairs, math.ceil(pairs / tile.m) + min(count, pairs))
    order, counts = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (pairs, count))
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    outputs = torch.empty(pairs, width, dtype=torch.float32, device=x.device)
    options = {"enable_fp_fusion": not deterministic, **chained(x.device)}
    blocks = {
        "EXPERTS": count,
        "EXPERT_BLOCK": block_of(count),
        "INNER": inner,
        "WIDTH": width,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k if gate_up.scheme is None else CODED_K,
        "UPCAST": x.device.type == "cpu" and x.dtype == torch.bfloat16,  # the interpreter cannot multiply bfloat16
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    read = FEW_IDS if pairs <= FEW_IDS else IDS  # only two sizes, because Triton compiles a variant of the kernel for each
    _group_kernel[count,](order, counts, ids, pairs, BLOCK=read, num_warps=4, **options)
    _gate_up_kernel[triton.cdiv(2 * inner, tile.n), tiles](
        hidden,
        x,
        gate_up.data,
        *first.pointers,
        x if gate_up.bias is None else gate_up.bias,
        order,
        counts,
        activation.alpha,
        activation.limit,
        activation.shift,
        CHOICES=choices,
        HAS_BIAS=gate_up.bias is not None,
        **first.options,
        **blocks,
        **options,
    )
    _down_kernel[triton.cdiv(width, tile.n), tiles](
        outputs,
        hidden,
        down.data,
        *second.pointers,
        x if down.bias is None else down.bias,
        order,
        counts,
        HAS_BIAS=down.bias is not None,
        **second.options,
        **blocks,
        **options,
    )
    block = min(COLUMNS, block_of(width))
    _combine_kernel[rows, triton.cdiv(width, block)](  # rows are the first axis, because CUDA limits the second to 65535
        out, outputs, weights, CHOICES=choices, WIDTH=width, BLOCK=block, num_warps=warps_for(block), **options
    )
