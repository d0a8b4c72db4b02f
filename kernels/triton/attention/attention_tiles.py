"""Finds the rows, tokens, heads and keys of a program of paged attention."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(tile, first_row, num_rows, offsets, TILE_TOKENS: tl.constexpr, ONE_TOKEN: tl.constexpr):
    """Returns (row, index in the row of the tile's first token).

    The first tile of row r is offsets[r] // TILE_TOKENS + r, so that no sum over earlier rows is necessary. A row may therefore
    have more tiles than its tokens need. For a tile that the row does not need, the index is after the row's last token.
    """
    if ONE_TOKEN:
        row = first_row + tile
        first = 0
    else:
        before = 0
        for begin in range(0, num_rows, 256):
            rows = begin + tl.arange(0, 256)
            inside = rows < num_rows
            owned = tl.load(offsets + rows, mask=inside, other=0) // TILE_TOKENS + rows
            before += tl.sum((inside & (owned <= tile)).to(tl.int32), 0)
        row = before - 1
        first = (tile - tl.load(offsets + row) // TILE_TOKENS - row) * TILE_TOKENS
    return row, first


@triton.jit
def find_span(slot, start, first, count, window, TILE_TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Returns (first, last + 1) of the positions to which the tile's tokens attend; an empty range for a slot below 0."""
    end = start + tl.minimum(first + TILE_TOKENS, count)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(start + first + 1 - window, 0)
    return tl.where(slot < 0, 0, begin), tl.where(slot < 0, 0, end)


@triton.jit
def find_split(begin, end, splits, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Divides positions begin .. end - 1 into at most `splits` splits of equal size; the last split may be smaller.

    Returns:
        (number of positions of a split, number of nonempty splits, at least 1).
    """
    blocks = tl.cdiv(end - begin, BLOCK_N)
    each = tl.maximum(tl.cdiv(blocks, splits), MIN_BLOCKS)
    return each * BLOCK_N, tl.maximum(tl.cdiv(blocks, each), 1)


@triton.jit
def fixed_splits(begin, end, BLOCK_N: tl.constexpr, SPLIT_SIZE: tl.constexpr):
    """Returns (position of the first block, start of its split, number of splits) of the span begin .. end - 1.

    Blocks begin at positions that are multiples of BLOCK_N, and splits at multiples of SPLIT_SIZE, which is a multiple of
    BLOCK_N. Blocks and splits are therefore the same for every span.
    """
    first = begin // BLOCK_N * BLOCK_N
    base = begin // SPLIT_SIZE * SPLIT_SIZE
    return first, base, tl.maximum(tl.cdiv(end - base, SPLIT_SIZE), 1)


@triton.jit
def fixed_split(split, base, begin, end, SPLIT_SIZE: tl.constexpr):
    """Returns (first position, last + 1) of one of the splits of fixed_splits()."""
    return tl.maximum(base + split * SPLIT_SIZE, begin), tl.minimum(base + (split + 1) * SPLIT_SIZE, end)


@triton.jit
def share_out(blocks, share, MAX_SPLITS: tl.constexpr):
    """Returns the dealt splits of rows with `blocks` blocks of keys.

    A split has at most `share` blocks, unless the row would then have more than MAX_SPLITS splits.

    Returns:
        (blocks of each split except the last, number of nonempty splits, at least 1), per row.
    """
    wanted = tl.minimum(tl.maximum(tl.cdiv(blocks, share), 1), MAX_SPLITS)
    each = tl.maximum(tl.cdiv(blocks, wanted), 1)
    return each, tl.maximum(tl.cdiv(blocks, each), 1)


@triton.jit
def find_range(
    begin,
    end,
    split,
    share,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    DEAL: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Returns the position range of split `split` of the span begin .. end - 1.

    Returns:
        (first position of the span, start of the span's first split, first position of the split, last position of the split + 1,
        number of splits of the span).
    """
    base, lower, upper = begin, begin, end
    used = 1
    if FIXED:
        begin, base, used = fixed_splits(begin, end, BLOCK_N, MIN_BLOCKS * BLOCK_N)
        lower, upper = fixed_split(split, base, begin, end, MIN_BLOCKS * BLOCK_N)
    elif SPLIT:
        if DEAL:
            each, used = share_out(tl.cdiv(end - begin, BLOCK_N), share, MAX_SPLITS)
            each = each * BLOCK_N
        else:
            each, used = find_split(begin, end, tl.num_programs(1), BLOCK_N, MIN_BLOCKS)
        lower = begin + split * each
        upper = tl.minimum(lower + each, end)
    return begin, base, lower, upper, used


@triton.jit
def row_blocks(begin, first_row, num_rows, slots, starts, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Returns (blocks of keys, whether the row exists) of the 256 rows from first_row + begin on, which have one token each."""
    rows = begin + tl.arange(0, 256)
    inside = rows < num_rows
    slot = tl.load(slots + first_row + rows, mask=inside, other=-1)
    start = tl.load(starts + first_row + rows, mask=inside, other=0)
    first, end = find_span(slot, start, 0, 1, window, 1, HAS_WINDOW)
    return tl.cdiv(end - first, BLOCK_N), inside


@triton.jit
def deal_splits(
    item,
    extra,
    first_row,
    num_rows,
    slots,
    starts,
    window,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Finds the split of program `item` among num_rows + extra programs.

    Returns:
        (row, dealt, split, share): the row, counted from first_row (num_rows if no row needs the program); the number of splits
        beyond one per row in earlier rows; the index of the split in its row; the largest number of blocks per split.

    The share is 1 / `extra` of the blocks of all rows, but at least MIN_BLOCKS. A row of b blocks has at most (b - 1) // share
    splits beyond one, so that all rows together have at most `extra` such splits. A row that is much longer than the others gets
    many splits. Rows of equal length get additional splits only if there are few rows.
    """
    total = 0
    for begin in range(0, num_rows, 256):
        blocks, inside = row_blocks(begin, first_row, num_rows, slots, starts, window, BLOCK_N, HAS_WINDOW)
        total += tl.sum(blocks, 0)
    share = tl.maximum(tl.cdiv(total, extra), MIN_BLOCKS)
    row = 0
    first = 0
    dealt = 0
    for begin in range(0, num_rows, 256):
        blocks, inside = row_blocks(begin, first_row, num_rows, slots, starts, window, BLOCK_N, HAS_WINDOW)
        _, used = share_out(blocks, share, MAX_SPLITS)
        used = tl.where(inside, used, 0)
        ends = dealt + tl.cumsum(used, 0)
        passed = inside & (ends <= item)
        row += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, ends, 0), 0))
        dealt += tl.sum(used, 0)
    return row, first - row, item - first, share


@triton.jit
def find_work(
    tile,
    tiles,
    first_row,
    num_rows,
    slots,
    starts,
    offsets,
    window,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    DEAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Returns (row, index in the row of the tile's first token, split, dealt, share) of tile `tile` of the grid.

    deal_splits() explains `dealt` and `share`.
    """
    dealt = 0
    share = 0
    if DEAL:
        row, dealt, split, share = deal_splits(
            tile, tiles - num_rows, first_row, num_rows, slots, starts, window, BLOCK_N, MIN_BLOCKS, MAX_SPLITS, HAS_WINDOW
        )
        row += first_row
        first = 0
    else:
        # The grid has the tiles in reverse order, so that the last tiles of a row, which attend to the most keys, start first.
        ordered = tile if ONE_TOKEN else tiles - 1 - tile
        row, first = find_tile(ordered, first_row, num_rows, offsets, TILE_TOKENS, ONE_TOKEN)
        split = tl.program_id(1)
    return row, first, split, dealt, share


@triton.jit
def find_lanes(
    across,
    first,
    count,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Returns (index of the token in its row, query head, whether the lane has a query) of each lane.

    The heads of a token are in adjacent lanes.

    Args:
        across: kv_head * chunks + chunk, where a chunk is HEADS of the GROUP query heads of a key/value head.
        first: the tile's first token in its row.
        count: tokens of the row.
    """
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    lanes = tl.arange(0, BLOCK_M)
    own = first + lanes // HEADS
    member = across % CHUNKS * HEADS + lanes % HEADS
    valid = (lanes < TILE_TOKENS * HEADS) & (own < count) & (member < GROUP)
    return own, across // CHUNKS * GROUP + member, valid
