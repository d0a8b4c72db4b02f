"""Finds the maxima of spans of each row: the first stage of select_tokens(). For a greedy row, the other stages measure nothing.

The grid is rows by spans of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.triton.sampling.select_keys import (
    GREEDY,
    LIKELIEST,
    NUCLEUS,
    TOP_N_SIGMA,
    is_edited,
    kind_of,
    real_param,
)
from rootstock_llm.kernels.triton.sampling.select_scratch import GROUP, PIVOTS, ROUNDS

ROW_COLUMNS = ["slots", "positions", "mask_rows", "loss_offsets"]


@triton.jit
def with_infinity(x):
    """Replaces NaN by infinity, because a maximum may ignore NaN. Both values cause the same fault."""
    return tl.where(x != x, float("inf"), x)


@triton.jit
def is_finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def measure_spread(source, tile, vocab_size, spreads, num_tiles, TILE: tl.constexpr):
    """Stores the number, the mean and the sum of squared deviations of one tile's finite logits.

    These values are stored per tile, so that a row's sums do not depend on the division of its tiles between programs.
    """
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf"))
    finite = is_finite(x)
    number = tl.sum(finite.to(tl.int32)).to(tl.float64)
    wide = tl.where(finite, x, 0.0).to(tl.float64)
    mean = tl.sum(wide) / tl.maximum(number, 1.0)
    away = tl.where(finite, wide - mean, 0.0)
    tl.store(spreads + tile, number)
    tl.store(spreads + num_tiles + tile, mean)
    tl.store(spreads + 2 * num_tiles + tile, tl.sum(away * away))


@triton.jit
def clear_sums(counts, masses, row):
    """Sets the row's counts and masses to 0. Later stages add to them."""
    offsets = row * ROUNDS * PIVOTS + tl.arange(0, ROUNDS * PIVOTS)
    tl.store(counts + offsets, tl.zeros((ROUNDS * PIVOTS,), tl.int32))
    tl.store(masses + offsets, tl.zeros((ROUNDS * PIVOTS,), tl.int64))


@triton.jit(do_not_specialize=["tiles_each"], do_not_specialize_on_alignment=ROW_COLUMNS)
def peaks_kernel(
    logits, edited, slot_params, slots, positions, mask_rows, loss_offsets, tops, raw_tops, top_ids, spreads, group_tops, counts,
    masses, vocab_size, num_groups, max_parts, tiles_each, TILE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if part == 0:
        clear_sums(counts, masses, row)
    changed = is_edited(slot_params, slot, positions, mask_rows, loss_offsets, row)
    kind = kind_of(slot_params, slot, vocab_size)
    grouped = (kind == LIKELIEST) | (kind == NUCLEUS)
    raw = logits + row.to(tl.int64) * vocab_size
    source = raw
    if changed:
        source = edited + row.to(tl.int64) * vocab_size
    best = tl.full((TILE,), float("-inf"), tl.float32)
    raw_best = tl.full((TILE,), float("-inf"), tl.float32)
    best_ids = tl.zeros((TILE,), tl.int32)
    first = part * tiles_each
    for tile in tl.range(first, tl.minimum(first + tiles_each, tl.cdiv(vocab_size, TILE)), num_stages=3):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < vocab_size
        x = with_infinity(tl.load(source + ids, mask=inside, other=float("-inf")))
        better = x > best
        best = tl.where(better, x, best)
        best_ids = tl.where(better, ids, best_ids)
        if changed:
            raw_best = tl.maximum(raw_best, with_infinity(tl.load(raw + ids, mask=inside, other=float("-inf"))))
        if grouped:
            groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            highest = tl.max(tl.reshape(x, (TILE // GROUP, GROUP)), axis=1)
            tl.store(group_tops + row.to(tl.int64) * num_groups + groups, highest, mask=groups < num_groups)
    top = tl.max(best)
    index = row * max_parts + part
    tl.store(tops + index, top)
    tl.store(top_ids + index, tl.min(tl.where(best == top, best_ids, vocab_size)))
    raw_top = top
    if changed:
        raw_top = tl.max(raw_best)
    tl.store(raw_tops + index, raw_top)
    if (kind != GREEDY) & (real_param(slot_params, slot, TOP_N_SIGMA) > 0.0):
        num_tiles = tl.cdiv(vocab_size, TILE)
        for tile in range(first, tl.minimum(first + tiles_each, num_tiles)):
            measure_spread(source, tile, vocab_size, spreads + row * 3 * num_tiles, num_tiles, TILE)
