"""Computes Gated DeltaNet token by token: the causal convolution, the gated delta rule and the gated norm.

A program has some columns of one row's state in registers while it passes over the row's tokens. The bits of a token therefore do
not depend on other rows, or on the way in which its sequence is cut into rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import DeltaGates, RaggedRows, StateRows, misfit, require_contiguous
from rootstock_llm.kernels.triton.launch import block_of, chained, take_turn, warps_for

CHANNELS = 256  # largest number of channels of a program of the convolution
COLUMNS = 32  # largest number of columns of a state in one program
# These columns begin anywhere in an upload, so their alignment must not select a variant of a kernel.
ROW_COLUMNS = ["offsets", "counts", "before", "after", "cuts", "at_cut"]


@triton.jit
def _input(qkv, pool, first, source, at, channels, inside, SIZE: tl.constexpr, TAPS: tl.constexpr):
    """Returns the float32 inputs of the row's token `at`. If `at` is below 0, reads earlier inputs from unit `source`."""
    own = tl.load(qkv + (first + at) * SIZE + channels, mask=inside & (at >= 0), other=0.0)
    old = tl.load(
        pool + (source * (TAPS - 1) + at + TAPS - 1) * SIZE + channels, mask=inside & (at < 0) & (source >= 0), other=0.0
    )
    return tl.where(at >= 0, own, old).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _convolve_kernel(qkv, weight, pool, offsets, counts, before, after, cuts, at_cut,
                     SIZE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    take_turn(CHAINED)
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < SIZE
    # Masks compare blocks, because the interpreter cannot join the comparison of a number with that of a block.
    zeros = channels * 0
    first, count = tl.load(offsets + row).to(tl.int64), tl.load(counts + row)
    source = zeros + tl.load(before + row).to(tl.int64)
    # The inputs of the last TAPS - 1 tokens are stored before the loop overwrites them.
    for part in tl.static_range(2):
        end = count if part == 0 else tl.load(cuts + row)
        unit = zeros + tl.load((after if part == 0 else at_cut) + row).to(tl.int64)
        stored = inside & (unit >= 0) & (zeros + end > part - 1)  # a row without tokens copies its state
        for i in tl.static_range(TAPS - 1):
            x = _input(qkv, pool, first, source, zeros + end - (TAPS - 1) + i, channels, inside, SIZE, TAPS)
            tl.store(pool + (unit * (TAPS - 1) + i) * SIZE + channels, x.to(pool.dtype.element_ty), mask=stored)
    for back in range(count):  # from the last token to the first, so that each input is read before it is overwritten
        t = count - 1 - back
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            x = _input(qkv, pool, first, source, zeros + t - (TAPS - 1) + tap, channels, inside, SIZE, TAPS)
            total += x * tl.load(weight + channels * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        value = total / (1.0 + tl.exp(-total))
        tl.store(qkv + (first + t) * SIZE + channels, value.to(qkv.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def _delta_kernel(out, qkv, gates, rates, biases, pool, offsets, counts, before, after, cuts, at_cut, scale,
                  SIZE: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
                  VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    take_turn(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    keys = tl.arange(0, KEYS)
    has_key, has_column = keys < KEY_DIM, columns < VALUE_DIM
    has_both = has_key[:, None] & has_column[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    first, count = tl.load(offsets + row).to(tl.int64), tl.load(counts + row)
    source, cut = tl.load(before + row).to(tl.int64), tl.load(cuts + row)
    cut_unit, unit = tl.load(at_cut + row).to(tl.int64), tl.load(after + row).to(tl.int64)
    places = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + columns[None, :]
    stride = HEADS * KEY_DIM * VALUE_DIM
    zeros = keys[:, None] * 0  # see _convolve_kernel()
    state = tl.load(pool + source * stride + places, mask=has_both & (zeros + source >= 0), other=0.0)
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    for t in range(count):
        token = qkv + (first + t) * SIZE
        query = tl.load(token + key_head * KEY_DIM + keys, mask=has_key, other=0.0).to(tl.float32)
        key = tl.load(token + (KEY_HEADS + key_head) * KEY_DIM + keys, mask=has_key, other=0.0).to(tl.float32)
        value = tl.load(token + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns, mask=has_column, other=0.0).to(tl.float32)
        query = query * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * scale
        key = key * tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        learning = tl.load(gates + (first + t) * 2 * HEADS + head).to(tl.float32)
        gate = tl.load(gates + (first + t) * 2 * HEADS + HEADS + head).to(tl.float32) + bias
        softplus = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
        state = state * tl.exp(-rate * softplus)
        delta = (value - tl.sum(state * key[:, None], axis=0)) / (1.0 + tl.exp(-learning))
        state = state + key[:, None] * delta[None, :]
        mixed = tl.sum(state * query[:, None], axis=0)
        target = out + ((first + t) * HEADS + head) * VALUE_DIM + columns
        tl.store(target, mixed.to(out.dtype.element_ty), mask=has_column)
        if t + 1 == cut:
            tl.store(pool + cut_unit * stride + places, state, mask=has_both & (zeros + cut_unit >= 0))
    tl.store(pool + unit * stride + places, state, mask=has_both & (zeros + unit >= 0))


def gated_delta_rule(
    out: Tensor,
    qkv: Tensor,
    gates: Tensor,
    weight: Tensor,
    decay: DeltaGates,
    rows: RaggedRows,
    states: StateRows,
    conv_pool: Tensor,
    state_pool: Tensor,
) -> None:
    """Implements Kernels.gated_delta_rule() in two launches. Raises ValueError if the shapes do not fit."""
    require_contiguous(out, qkv, gates, weight, decay.rates, decay.biases, conv_pool, state_pool)
    units, heads, key_dim, value_dim = state_pool.shape
    size, taps = weight.shape
    key_heads = (size - heads * value_dim) // (2 * key_dim)
    fits = qkv.shape == (len(out), size) and conv_pool.shape == (units, taps - 1, size) and out.shape[1] == heads * value_dim
    if not fits or gates.shape != (len(out), 2 * heads) or key_heads < 1 or heads % key_heads:
        raise misfit(out, qkv, gates, weight, conv_pool, state_pool)
    if 2 * key_heads * key_dim + heads * value_dim != size or state_pool.dtype != torch.float32:
        raise misfit(weight, state_pool)
    num_rows = len(rows.offsets)
    if not num_rows:
        return
    columns = (rows.offsets, rows.num_tokens, states.before, states.after, states.cuts, states.at_cut)
    block = min(CHANNELS, triton.next_power_of_2(size))
    _convolve_kernel[(num_rows, triton.cdiv(size, block))](
        qkv, weight, conv_pool, *columns, SIZE=size, TAPS=taps, BLOCK=block, num_warps=warps_for(block), **chained(qkv.device)
    )
    width = min(COLUMNS, triton.next_power_of_2(value_dim))
    _delta_kernel[(num_rows, heads, triton.cdiv(value_dim, width))](
        out,
        qkv,
        gates,
        decay.rates,
        decay.biases,
        state_pool,
        *columns,
        key_dim**-0.5,
        SIZE=size,
        KEY_HEADS=key_heads,
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEYS=triton.next_power_of_2(key_dim),
        COLUMNS=width,
        num_warps=4,
        **chained(qkv.device),
    )


@triton.jit
def _gated_norm_kernel(out, x, gate, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    take_turn(CHAINED)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + columns
    wide = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps) * gain
    tl.store(out + offsets, (normed * gates / (1.0 + tl.exp(-gates))).to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """Implements Kernels.gated_rms_norm(). Raises ValueError if the shapes do not fit."""
    require_contiguous(out, x, gate, weight)
    if not out.shape == x.shape == gate.shape or weight.shape[0] != x.shape[1]:
        raise misfit(out, x, gate, weight)
    rows, width = x.shape
    if rows:
        block = block_of(width)
        _gated_norm_kernel[(rows,)](
            out, x, gate, weight, eps, WIDTH=width, BLOCK=block, num_warps=warps_for(block), **chained(x.device)
        )
