"""How attention is launched, from numbers that the host knows: block sizes, tiles, splits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

MIN_DOT = 16  # rows and columns of the smallest product that tensor cores take
MAX_SPLITS = 64
SPLIT_PLACES = 256  # keys and values that are worth a split: less costs more to merge than it saves
DECODE_PROGRAMS = 8  # of a split launch for each multiprocessor: it holds three at a time, and uneven rows even out
EXTEND_PROGRAMS = 2
FIXED_PLACES, FIXED_SPLITS = 512, 32  # places of a fixed split at least, and splits of the longest context at most


@dataclass(frozen=True, slots=True)
class Blocks:
    """m: query lanes of a tile, tokens times heads. n: keys of a block; num_stages - 1 blocks are on their way at a time."""

    m: int
    n: int
    num_warps: int
    num_stages: int


# By the larger of key and value size, rounded up to a power of two, and bytes of an element. A Hopper multiprocessor has
# 227 KiB of shared memory and 64 Ki registers; wgmma wants 64 query lanes a warp group. None of them spills registers on sm_90.
WIDE_BLOCKS: dict[tuple[int, int], Blocks] = {  # prompts that fill the device
    (64, 2): Blocks(128, 128, 8, 3),
    (128, 2): Blocks(128, 64, 8, 3),
    (256, 2): Blocks(128, 32, 8, 3),
    (512, 2): Blocks(32, 32, 8, 2),
    (1024, 2): Blocks(16, 16, 8, 2),
    (64, 4): Blocks(64, 32, 8, 2),
    (128, 4): Blocks(32, 16, 8, 2),
    (256, 4): Blocks(16, 32, 8, 2),
}
NARROW_BLOCKS: dict[tuple[int, int], Blocks] = {  # prompts that do not
    (64, 2): Blocks(64, 64, 4, 3),
    (128, 2): Blocks(64, 64, 4, 3),
    (256, 2): Blocks(64, 32, 8, 3),
    (512, 2): Blocks(32, 32, 8, 2),
    (1024, 2): Blocks(16, 16, 8, 2),
    (64, 4): Blocks(32, 32, 8, 2),
    (128, 4): Blocks(16, 16, 4, 2),
    (256, 4): Blocks(16, 32, 8, 2),
}
DECODE_BLOCKS: dict[tuple[int, int], Blocks] = {  # rows of one token: 32 KiB a stage, three programs a multiprocessor
    (64, 2): Blocks(16, 128, 4, 3),
    (128, 2): Blocks(16, 64, 4, 3),
    (256, 2): Blocks(16, 32, 4, 3),
    (512, 2): Blocks(16, 32, 8, 2),
    (1024, 2): Blocks(16, 16, 8, 2),
    (64, 4): Blocks(16, 32, 8, 2),
    (128, 4): Blocks(16, 32, 8, 2),
    (256, 4): Blocks(16, 32, 8, 2),
}
SMALLEST_BLOCKS = Blocks(16, 16, 8, 1)  # sizes that no table has
MAX_DECODE_LANES = 64  # query heads of one program, where its results fit registers: up to values of WIDEST
WIDEST = 256


@dataclass(frozen=True, slots=True)
class HeadShape:
    """group: query heads of a key/value head. itemsize: bytes of an element."""

    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    itemsize: int

    @property
    def size(self) -> int:
        """Of the tables: what a program pads keys and values to, 64 at least."""
        return max(64, int(triton.next_power_of_2(max(self.head_dim, self.value_dim))))

    def blocks(self, table: dict[tuple[int, int], Blocks]) -> Blocks:
        return table.get((self.size, self.itemsize), SMALLEST_BLOCKS)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of attention_kernel over rows first_row .. first_row + num_rows - 1.

    one_token: every one of them has one. heads: query heads of a tile. tiles: of tokens, an upper bound. programs: first axis of
    the grid. splits: of the keys of a tile at most; 0 for a launch that cannot split. min_blocks: of keys that a split has at
    least. extra: splits beyond one a row, of all rows together, that the device deals out by the rows' lengths; then `splits` is
    1, the grid's second axis. 0: each tile has `splits`. fixed: splits of min_blocks blocks each, at fixed places, of which a
    tile has `room` at most; each of its `splits` programs takes every splits-th of them, and one takes all where `splits` is 0.
    """

    first_row: int
    num_rows: int
    one_token: bool
    blocks: Blocks
    heads: int
    tiles: int
    programs: int
    splits: int
    min_blocks: int
    extra: int = 0
    fixed: bool = False
    room: int = 0

    @property
    def dealt_programs(self) -> int:
        """Of the splits that are dealt out."""
        return self.programs // (self.tiles + self.extra) * self.extra

    @property
    def scratch_lanes(self) -> int:
        """Query lanes of partial results. Of dealt splits: each, and the first ones of at most as many rows."""
        if self.extra:
            return 2 * self.dealt_programs * self.blocks.m
        return self.programs * (self.room or self.splits) * self.blocks.m if self.splits > 1 else 0

    @property
    def counters(self) -> int:
        if self.extra:
            return self.dealt_programs
        return self.programs if self.splits > 1 else 0


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 elsewhere, where programs run one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def choose_splits(programs: int, wanted: int, max_context: int) -> int:
    """So many that `programs` tiles become about `wanted` programs, and that a split has SPLIT_PLACES of the longest context at
    least."""
    return max(min(round(wanted / programs), -(-max_context // SPLIT_PLACES), MAX_SPLITS), 1)


def reach(max_context: int, window: int) -> int:
    """Places that a token sees at most."""
    return min(max_context, window) if window else max_context


def scratch_bounds(shape: HeadShape, multiprocessors: int) -> tuple[int, int]:
    """(scratch_lanes, counters) that no plan below exceeds: `wanted` programs are overshot by a third at most, by 1.5 tiles'
    worth that round to 2 splits; a row whose heads alone are more has one split to spare."""
    row = plan_decode(shape, 0, 1, 1, multiprocessors)
    dealt = max(DECODE_PROGRAMS * multiprocessors, row.programs)
    narrow = shape.blocks(NARROW_BLOCKS).m * (EXTEND_PROGRAMS * multiprocessors * 4 // 3 + 1)
    return max(2 * dealt * row.blocks.m, narrow), dealt


def plan_decode(shape: HeadShape, first_row: int, num_rows: int, max_context: int, multiprocessors: int) -> Launch:
    """Rows of one token. The number of rows and max_context fix the launch: a graph takes the largest there may be.

    Several rows are split by their lengths, which are known on the device alone: one long row among many short ones must not be
    streamed by one program. A row by itself needs no dealing.
    """
    blocks = shape.blocks(DECODE_BLOCKS)
    heads = min(shape.group, MAX_DECODE_LANES if shape.size <= WIDEST else MIN_DOT)
    lanes = max(triton.next_power_of_2(heads), MIN_DOT)
    across = shape.num_kv_heads * -(-shape.group // heads)
    wanted = DECODE_PROGRAMS * multiprocessors
    of_row = choose_splits(across, wanted, max_context) if num_rows == 1 else 1
    longest = min(-(-max_context // SPLIT_PLACES), MAX_SPLITS)
    extra = max(min(wanted // across, num_rows * (longest - 1)), 1) if num_rows > 1 else 0
    return Launch(
        first_row=first_row,
        num_rows=num_rows,
        one_token=True,
        blocks=Blocks(lanes, blocks.n, blocks.num_warps, blocks.num_stages),
        heads=heads,
        tiles=num_rows,
        programs=(num_rows + extra) * across,
        splits=of_row,
        min_blocks=max(SPLIT_PLACES // blocks.n, 1),
        extra=extra,
    )


def plan_extend(shape: HeadShape, num_rows: int, num_tokens: int, max_context: int, multiprocessors: int) -> Launch:
    """Rows 0 .. num_rows - 1 of num_tokens tokens together: wide tiles where the rows fill them and they fill the device, else
    narrow ones, whose keys are split."""
    wide = _tiled(shape, shape.blocks(WIDE_BLOCKS), num_rows, num_tokens, 0)
    narrow = _tiled(shape, shape.blocks(NARROW_BLOCKS), num_rows, num_tokens, 1)
    if wide.programs >= multiprocessors and num_tokens * shape.group > num_rows * narrow.blocks.m:
        return wide
    splits = choose_splits(narrow.programs, EXTEND_PROGRAMS * multiprocessors, max_context)
    return _tiled(shape, narrow.blocks, num_rows, num_tokens, splits)


def fixed_places(max_context: int) -> int:
    """Of a split, so that the longest context of a worker has FIXED_SPLITS or fewer whole ones."""
    return max(FIXED_PLACES, int(triton.next_power_of_2(-(-max_context // FIXED_SPLITS))))


def plan_fixed(
    shape: HeadShape, num_rows: int, num_tokens: int, max_context: int, places: int, multiprocessors: int, one_token: bool = False
) -> Launch:
    """Rows of any numbers of tokens, one with the same blocks as many, so that a token's result does not depend on the launch.
    max_context: the longest of these rows, or what a window leaves of it. places: see fixed_places; the same for all launches.
    one_token: every row has one, and a tile is a row."""
    blocks = shape.blocks(NARROW_BLOCKS)
    whole = _fixed(shape, blocks, num_rows, num_tokens, places, one_token)
    if not one_token and num_tokens * shape.group > num_rows * blocks.m:
        wide = _fixed(shape, _doubled(blocks), num_rows, num_tokens, places, one_token)
        if wide.programs >= multiprocessors:
            return wide
    room = _fixed_room(max_context, places, whole.blocks)
    wanted = EXTEND_PROGRAMS * multiprocessors // whole.programs
    if wanted <= 1 or max_context <= places:
        return whole
    return replace(whole, splits=min(wanted, room), room=room)


def fixed_scratch_bounds(shape: HeadShape, max_context: int, multiprocessors: int) -> tuple[int, int]:
    """(scratch_lanes, counters) that no plan_fixed exceeds."""
    programs = EXTEND_PROGRAMS * multiprocessors // 2  # of tiles whose keys are split
    blocks = shape.blocks(NARROW_BLOCKS)
    return programs * _fixed_room(max_context, fixed_places(max_context), blocks) * blocks.m, programs


def _fixed_room(places_seen: int, places: int, blocks: Blocks) -> int:
    """Splits that a tile may need, whose tokens together see a tile's tokens more; a window may begin inside a split."""
    return -(-(places_seen + blocks.m) // places) + 1


def _doubled(blocks: Blocks) -> Blocks:
    """Twice the lanes by twice the warps, where a warp group has the lanes that it had: a lane's sums are the same."""
    return replace(blocks, m=2 * blocks.m, num_warps=2 * blocks.num_warps) if blocks.m == 16 * blocks.num_warps else blocks


def _fixed(shape: HeadShape, blocks: Blocks, num_rows: int, num_tokens: int, places: int, one_token: bool) -> Launch:
    launch = replace(_tiled(shape, blocks, num_rows, num_tokens, 0), min_blocks=places // blocks.n, fixed=True)
    if not one_token:
        return launch
    return replace(launch, one_token=True, tiles=num_rows, programs=launch.programs // launch.tiles * num_rows)


def _tiled(shape: HeadShape, blocks: Blocks, num_rows: int, num_tokens: int, splits: int) -> Launch:
    heads = min(shape.group, blocks.m)
    tiles = num_tokens // (blocks.m // heads) + num_rows
    programs = tiles * shape.num_kv_heads * -(-shape.group // heads)
    return Launch(0, num_rows, False, blocks, heads, tiles, programs, splits, max(SPLIT_PLACES // blocks.n, 1))


def retiled(shape: HeadShape, launch: Launch, blocks: Blocks, splits: int, num_tokens: int) -> Launch:
    """The same work with other block sizes, and as many splits for each tile. Only a launch with splits may be given some."""
    if launch.one_token:
        programs = launch.programs // (launch.tiles + launch.extra) * launch.tiles
        min_blocks = max(SPLIT_PLACES // blocks.n, 1)
        return replace(launch, programs=programs, extra=0, blocks=blocks, splits=splits, min_blocks=min_blocks)
    return _tiled(shape, blocks, launch.num_rows, num_tokens, splits)
