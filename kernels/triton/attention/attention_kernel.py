"""Computes attention of ragged rows to keys and values in pages, with tiles of tokens or rows of one token."""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.triton.attention.attention_block import fold_tile, load_rows
from rootstock_llm.kernels.triton.attention.attention_merge import (
    fold_splits,
    merge_tile,
    split_index,
    split_indices,
    store_means,
    store_split,
    take_first,
)
from rootstock_llm.kernels.triton.attention.attention_tiles import find_lanes, find_range, find_span, find_work
from rootstock_llm.kernels.triton.launch import last_to_end, take_turn


# do_not_specialize: Triton compiles no variants for numbers and alignments that change from step to step.
# The kernel is one function of 120 lines: most lines are parameters, which a helper function would repeat.
@triton.jit(
    do_not_specialize=["first_row", "num_rows", "window", "split_capacity"],
    do_not_specialize_on_alignment=["slots", "starts", "num_tokens", "offsets"],
)
def attention_kernel(
    out,  # [T, H, E], contiguous
    q,  # [T, H, D], strided
    k_pool,  # [P, G, S, D]
    v_pool,  # [P, G, S, E]
    page_table,  # int32[slots, pages]
    slots,  # int32[R], like starts, num_tokens and offsets
    starts,
    num_tokens,
    offsets,
    sinks,  # float32[H]; without HAS_SINKS, any pointer
    partials,  # float32[splits * BLOCK_M, E]; without SPLIT, partials, levels and arrivals may be any pointer
    levels,  # float32[splits * BLOCK_M]
    arrivals,  # int32[counters]: number of ended programs of each tile; 0 before and after the launch
    out_stride,
    q_stride,
    q_head_stride,
    table_stride,
    first_row,
    num_rows,
    window,
    split_capacity,  # largest number of splits of a tile, without DEAL
    score_scale,
    cap_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key/value head
    HEADS: tl.constexpr,  # query heads of a tile, at most GROUP
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # largest number of splits of a row, with DEAL
    ONE_TOKEN: tl.constexpr,  # whether rows have one token each; if not, rows 0 .. num_rows - 1 have any number of tokens
    SPLIT: tl.constexpr,  # whether several programs may share the keys of a tile
    DEAL: tl.constexpr,  # whether splits are dealt (see Launch), only with ONE_TOKEN; if not, a tile's splits are the second axis
    FIXED: tl.constexpr,  # whether splits are fixed (see Launch) and have MIN_BLOCKS blocks of keys each; excludes DEAL
    MERGE: tl.constexpr,  # whether the program that ends last for a tile merges its splits; if not, merge_kernel merges them
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LANES: tl.constexpr,  # lanes of a tile that have queries
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Computes TILE_TOKENS tokens of one row times HEADS query heads, packed into BLOCK_M lanes, over one split of their keys.

    With FIXED, a program may compute several splits.

    With DEAL, the grid has one tile per row and Launch.extra additional tiles for splits of long rows. The programs of tiles that
    no row needs return at once.

    With FIXED, the bits of a token's result depend only on the token and the positions to which it attends, if all launches have
    the same BLOCK_N and the same number of lanes per warp. Several programs (SPLIT) and a single program compute and merge the
    splits in the same order.
    """
    # fmt: off
    take_turn(CHAINED)
    TILE_TOKENS: tl.constexpr = 1 if ONE_TOKEN else BLOCK_M // HEADS
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    across = NUM_KV_HEADS * CHUNKS
    tiles = tl.num_programs(0) // across
    part = tl.program_id(0) % across
    row, first, split, dealt, share = find_work(
        tl.program_id(0) // across, tiles, first_row, num_rows, slots, starts, offsets, window,
        BLOCK_N, MIN_BLOCKS, MAX_SPLITS, TILE_TOKENS, ONE_TOKEN, DEAL, HAS_WINDOW,
    )
    if row == first_row + num_rows:  # no row needs this dealt split
        return
    slot, start = tl.load(slots + row), tl.load(starts + row)
    count = 1 if ONE_TOKEN else tl.load(num_tokens + row)
    if first >= count:
        return
    begin, end = find_span(slot, start, first, count, window, TILE_TOKENS, HAS_WINDOW)
    begin, base, lower, upper, used = find_range(begin, end, split, share, BLOCK_N, MIN_BLOCKS, MAX_SPLITS, SPLIT, DEAL, FIXED)
    if split >= used:
        return

    own, heads, valid = find_lanes(part, first, count, GROUP, HEADS, BLOCK_M, TILE_TOKENS)
    tokens = tl.load(offsets + row) + own
    positions = start + own
    queries = load_rows(q, tokens.to(tl.int64) * q_stride + heads * q_head_stride, valid, HEAD_DIM, BLOCK_D, True)
    table = page_table + slot.to(tl.int64) * table_stride  # never read if the slot is below 0
    kv_head = part // CHUNKS
    k_head = k_pool + kv_head * (PAGE_SIZE * HEAD_DIM)
    v_head = v_pool + kv_head * (PAGE_SIZE * VALUE_DIM)

    counter, step, kept_first, kept_rest = split_indices(dealt, part, across, tiles - num_rows, split_capacity, DEAL)
    if FIXED:
        programs = tl.minimum(used, tl.num_programs(1))
        acc, total, peak = fold_splits(
            partials, levels, kept_first, split, programs, valid,
            queries, k_head, v_head, table, base, used, begin, end, start + first, positions, window, score_scale, cap_scale,
            NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E,
            MIN_BLOCKS, SPLIT, ONE_TOKEN, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )
    else:
        programs = used
        acc, total, peak = fold_tile(
            queries, k_head, v_head, table, lower, upper, begin, end, start + first, positions, window, score_scale, cap_scale,
            NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E,
            ONE_TOKEN, False, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )
    if not SPLIT:
        store_means(out, acc, total, peak, sinks, tokens, heads, valid, out_stride, VALUE_DIM, BLOCK_E, HAS_SINKS)
    elif used == 1:
        if FIXED:
            acc, total, peak = take_first(acc, total, peak, BLOCK_M, BLOCK_E)
        store_means(out, acc, total, peak, sinks, tokens, heads, valid, out_stride, VALUE_DIM, BLOCK_E, HAS_SINKS)
    else:
        if not FIXED:
            number = split_index(split, kept_first, kept_rest, step)
            store_split(partials, levels, number, acc, total, peak, valid, BLOCK_M, BLOCK_E, VALUE_DIM)
        if MERGE:
            last = last_to_end(arrivals + counter, programs)
            if last:
                merge_tile(
                    out, sinks, partials, levels, kept_first, kept_rest, step, used, part, first, count, tl.load(offsets + row),
                    out_stride, GROUP, HEADS, VALUE_DIM, LANES, BLOCK_M, BLOCK_E, TILE_TOKENS, HAS_SINKS,
                )
    # fmt: on
