"""Which rows, tokens, heads and keys a program of paged attention works on."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(tile, first_row, num_rows, offsets, TILE_TOKENS: tl.constexpr, ONE_TOKEN: tl.constexpr):
    """(row, its first token in the tile) of a tile.

    Row r owns tiles from offsets[r] // TILE_TOKENS + r on: at least as many as its tokens need, in order, and no sum over the
    rows before it has to be known. A tile that its row does not need starts behind the row's last token.
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
    """(first, last + 1) of the places that tokens first .. of a row see: none for a slot below 0."""
    end = start + tl.minimum(first + TILE_TOKENS, count)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(start + first + 1 - window, 0)
    return tl.where(slot < 0, 0, begin), tl.where(slot < 0, 0, end)


@triton.jit
def find_split(begin, end, splits, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """(places of each split but the last, splits that have any, 1 at least). Short spans leave splits empty."""
    blocks = tl.cdiv(end - begin, BLOCK_N)
    each = tl.maximum(tl.cdiv(blocks, splits), MIN_BLOCKS)
    return each * BLOCK_N, tl.maximum(tl.cdiv(blocks, each), 1)


@triton.jit
def fixed_splits(begin, end, BLOCK_N: tl.constexpr, PLACES: tl.constexpr):
    """(first place, start of its split, splits) of a span whose blocks and splits lie where they do in any other span: at
    multiples of BLOCK_N and PLACES, which is one of BLOCK_N, counted from place 0."""
    first = begin // BLOCK_N * BLOCK_N
    base = begin // PLACES * PLACES
    return first, base, tl.maximum(tl.cdiv(end - base, PLACES), 1)


@triton.jit
def fixed_split(split, base, begin, end, PLACES: tl.constexpr):
    """(first place, last + 1) of a split of fixed_splits."""
    return tl.maximum(base + split * PLACES, begin), tl.minimum(base + (split + 1) * PLACES, end)


@triton.jit
def share_out(blocks, share, MAX_SPLITS: tl.constexpr):
    """(blocks of each split but the last, splits that have any, 1 at least) of rows of so many blocks, `share` of them or fewer
    to a split: even splits, of which a row has MAX_SPLITS at most."""
    wanted = tl.minimum(tl.maximum(tl.cdiv(blocks, share), 1), MAX_SPLITS)
    each = tl.maximum(tl.cdiv(blocks, wanted), 1)
    return each, tl.maximum(tl.cdiv(blocks, each), 1)


@triton.jit
def find_places(
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
    """(first place of the span, start of its first split, first and last + 1 of the split's, splits that the span has)."""
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
    """(blocks of keys, whether there is such a row) of rows begin .. begin + 255 of those from first_row on, one token each."""
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
    """(row counted from first_row, splits of the rows before it beyond one each, the item's split of its row, share): who works
    on item number `item` of num_rows + extra. row is num_rows where the item is nobody's.

    share: blocks of a split at most, of all rows' blocks one part in `extra`, so that all splits beyond one a row are `extra` at
    most: of b blocks they are (b - 1) // share. A row much longer than the others is split finely, equal ones only if they are
    few.
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
    """(row, first token in it, split, and, of DEAL, `dealt` and `share` of deal_splits) of number `tile` of the grid's tiles."""
    dealt = 0
    share = 0
    if DEAL:
        row, dealt, split, share = deal_splits(
            tile, tiles - num_rows, first_row, num_rows, slots, starts, window, BLOCK_N, MIN_BLOCKS, MAX_SPLITS, HAS_WINDOW
        )
        row += first_row
        first = 0
    else:
        # The last tiles of a row see the most: they begin first.
        turn = tile if ONE_TOKEN else tiles - 1 - tile
        row, first = find_tile(turn, first_row, num_rows, offsets, TILE_TOKENS, ONE_TOKEN)
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
    """(token in its row, query head, whether there is such a one) of each lane: the heads of a token side by side.

    across: number of the tile's heads, kv_head * chunks + chunk, where a chunk is HEADS of the GROUP of a key/value head.
    """
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    lanes = tl.arange(0, BLOCK_M)
    own = first + lanes // HEADS
    member = across % CHUNKS * HEADS + lanes % HEADS
    valid = (lanes < TILE_TOKENS * HEADS) & (own < count) & (member < GROUP)
    return own, across // CHUNKS * GROUP + member, valid
