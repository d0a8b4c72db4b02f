"""Completes a tile: attention sinks, the division by the softmax sum, and the merge of splits (Flash-Decoding, Dao et al. 2023).

Letters in shapes have the same meaning as in attention_block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.triton.attention.attention_block import fold_tile, load_rows
from rootstock_llm.kernels.triton.attention.attention_tiles import find_lanes, find_span, find_split, find_tile, fixed_split


@triton.jit
def store_means(
    out,
    acc,
    total,
    peak,
    sinks,
    tokens,
    heads,
    valid,
    out_stride,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Adds each head's sink to `total`, and stores acc / total in `out` [T, H, E]. A lane that attends to no position gets 0."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0) * 1.4426950408889634
        raised = tl.maximum(peak, sink)
        fade = tl.exp2(peak - raised)
        total = total * fade + tl.exp2(sink - raised)
        acc = acc * fade[:, None]
    means = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    columns = tl.arange(0, BLOCK_E)
    pointers = out + (tokens.to(tl.int64) * out_stride + heads * VALUE_DIM)[:, None] + columns[None, :]
    tl.store(pointers, means.to(out.dtype.element_ty), mask=valid[:, None] & (columns < VALUE_DIM)[None, :])


@triton.jit
def split_index(split, first, rest, step):
    """Returns the index of a split in `partials` and `levels`: `first` for split 0, rest + split * step for the others."""
    return tl.where(split == 0, first, rest + split * step)


@triton.jit
def split_indices(dealt, part, across, extra, split_capacity, DEAL: tl.constexpr):
    """Returns (counter, step, first, rest): the index of the tile's counter, and the arguments of split_index().

    With DEAL, the additional splits of all rows (split 1 and above) are stored one after the other, in the order of the rows.
    `dealt` is the number of additional splits in earlier rows. Split 0 of a row with additional splits is stored `extra` splits
    after the row's split 1. Without DEAL, a tile's splits are adjacent, with space for `split_capacity` splits per tile.
    """
    if DEAL:
        counter = dealt * across + part
        step = across
        first = counter + extra * across
        rest = counter - across
    else:
        counter = tl.program_id(0)
        step = 1
        first = counter * split_capacity
        rest = first
    return counter, step, first, rest


@triton.jit
def split_means(acc, total, peak):
    """Returns (means [M, E], level [M]) of one split.

    `level` is peak + log2(total), or -inf for a lane that attends to no position.
    """
    whole = tl.where(total == 0.0, 1.0, total)
    return acc * (1.0 / whole)[:, None], peak + tl.log2(whole)


@triton.jit
def take_split(acc, total, peak, means, level):
    """Adds the means and levels of one split to (acc [M, E], total [M], peak [M]), whose initial values are 0, 0 and -inf."""
    raised = tl.maximum(peak, level)
    base = tl.where(raised == float("-inf"), 0.0, raised)
    fade, weight = tl.exp2(peak - base), tl.exp2(level - base)
    return acc * fade[:, None] + means * weight[:, None], total * fade + weight, raised


@triton.jit
def take_first(acc, total, peak, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Returns the result of take_split() for a single split."""
    means, level = split_means(acc, total, peak)
    none = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    zero = tl.zeros([BLOCK_M], dtype=tl.float32)
    return take_split(none, zero, tl.full([BLOCK_M], float("-inf"), dtype=tl.float32), means, level)


@triton.jit
def store_split(
    partials, levels, number, acc, total, peak, valid, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Stores the means of one split, float32[M, E], in `partials`, and its level, float32[M], in `levels`."""
    at = number.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_E)
    means, level = split_means(acc, total, peak)
    pointers = partials + (at * VALUE_DIM)[:, None] + columns[None, :]
    tl.store(pointers, means, mask=valid[:, None] & (columns < VALUE_DIM)[None, :])
    tl.store(levels + at, level, mask=valid)


@triton.jit
def fold_splits(
    partials,
    levels,
    base_index,
    split,
    programs,
    valid,
    q,
    k_head,
    v_head,
    table,
    base,
    splits,
    begin,
    end,
    position,
    positions,
    window,
    score_scale,
    cap_scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes the fixed splits `split`, `split` + `programs`, `split` + 2 * `programs` … of a tile; see fold_tile().

    Args:
        base_index: index of the tile's split 0 in `partials` and `levels`.
        SPLIT: whether the splits are stored. A tile's only split is never stored.

    Returns:
        (acc [M, E], total [M], peak [M]) of the last computed split with SPLIT, else of all computed splits together.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    # fmt: off
    for own in range(split, splits, programs):
        lower, upper = fixed_split(own, base, begin, end, MIN_BLOCKS * BLOCK_N)
        own_acc, own_total, own_peak = fold_tile(
            q, k_head, v_head, table, lower, upper, begin, end, position, positions, window, score_scale, cap_scale,
            NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E,
            ONE_TOKEN, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )
        if SPLIT:
            if splits > 1:
                store_split(partials, levels, base_index + own, own_acc, own_total, own_peak, valid, BLOCK_M, BLOCK_E, VALUE_DIM)
            acc, total, peak = own_acc, own_total, own_peak
        else:
            means, level = split_means(own_acc, own_total, own_peak)
            acc, total, peak = take_split(acc, total, peak, means, level)
    # fmt: on
    return acc, total, peak


@triton.jit
def merge_splits(
    partials,
    levels,
    first,
    rest,
    step,
    used,
    valid,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Merges the first LANES lanes of the tile's `used` splits, which store_split() has stored.

    Returns (acc [LANES, E], total [LANES], peak [LANES]).
    """
    lanes = tl.arange(0, LANES)
    acc = tl.zeros([LANES, BLOCK_E], dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    peak = tl.full([LANES], float("-inf"), dtype=tl.float32)
    # Unrolling keeps the loads of several splits in flight if there are enough registers.
    for split in tl.range(0, used, loop_unroll_factor=4 if LANES * BLOCK_E <= 4096 else 1):
        at = split_index(split, first, rest, step).to(tl.int64) * BLOCK_M + lanes
        level = tl.load(levels + at, mask=valid, other=float("-inf"))
        part = load_rows(partials, at * VALUE_DIM, valid, VALUE_DIM, BLOCK_E, True)
        acc, total, peak = take_split(acc, total, peak, part, level)
    return acc, total, peak


@triton.jit
def merge_tile(
    out,
    sinks,
    partials,
    levels,
    kept_first,
    kept_rest,
    step,
    used,
    part,
    first,
    count,
    offset,
    out_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merges the splits of a tile into `out` [tokens, heads, E]. `offset` is the index of the row's first token in the batch."""
    own, heads, valid = find_lanes(part, first, count, GROUP, HEADS, LANES, TILE_TOKENS)
    acc, total, peak = merge_splits(
        partials, levels, kept_first, kept_rest, step, used, valid, LANES, BLOCK_M, BLOCK_E, VALUE_DIM
    )
    store_means(out, acc, total, peak, sinks, offset + own, heads, valid, out_stride, VALUE_DIM, BLOCK_E, HAS_SINKS)


# do_not_specialize: Triton compiles no variants for numbers and alignments that change from step to step.
@triton.jit(
    do_not_specialize=["first_row", "num_rows", "window", "splits"],
    do_not_specialize_on_alignment=["slots", "starts", "num_tokens", "offsets"],
)
def merge_kernel(
    out,
    slots,
    starts,
    num_tokens,
    offsets,
    sinks,
    partials,
    levels,
    out_stride,
    first_row,
    num_rows,
    window,
    splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merges the splits that attention_kernel has stored with SPLIT and without DEAL, FIXED and MERGE.

    The grid is the first axis of attention_kernel's grid.
    """
    TILE_TOKENS: tl.constexpr = 1 if ONE_TOKEN else BLOCK_M // HEADS
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    across = NUM_KV_HEADS * CHUNKS
    tiles = tl.num_programs(0) // across
    tile = tl.program_id(0) // across if ONE_TOKEN else tiles - 1 - tl.program_id(0) // across
    row, first = find_tile(tile, first_row, num_rows, offsets, TILE_TOKENS, ONE_TOKEN)
    count = 1 if ONE_TOKEN else tl.load(num_tokens + row)
    if first >= count:
        return
    begin, end = find_span(tl.load(slots + row), tl.load(starts + row), first, count, window, TILE_TOKENS, HAS_WINDOW)
    _, used = find_split(begin, end, splits, BLOCK_N, MIN_BLOCKS)
    if used == 1:
        return
    base = tl.program_id(0) * splits
    # fmt: off
    merge_tile(
        out, sinks, partials, levels, base, base, 1, used, tl.program_id(0) % across, first, count, tl.load(offsets + row),
        out_stride, GROUP, HEADS, VALUE_DIM, BLOCK_M, BLOCK_M, BLOCK_E, TILE_TOKENS, HAS_SINKS,
    )
    # fmt: on
