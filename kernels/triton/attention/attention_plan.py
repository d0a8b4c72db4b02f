"""Plans launches of attention from numbers that are known on the host: block sizes, tiles, splits.

A tile is a group of tokens of one row with some query heads. A split is a range of the keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

MIN_DOT = 16  # smallest number of rows and columns of a tensor core product
MAX_SPLITS = 64  # largest number of splits of a tile
SPLIT_POSITIONS = 256  # even and dealt splits are planned for at least this number of positions, because merges take time
# Programs per multiprocessor of a decode launch with splits. Three programs run at a time; the others balance rows of uneven
# lengths.
DECODE_PROGRAMS = 8
EXTEND_PROGRAMS = 2  # programs per multiprocessor of an extend launch with splits
# Smallest number of positions per fixed split; largest number of fixed splits of the longest context.
FIXED_POSITIONS, FIXED_SPLITS = 512, 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes of one program."""

    m: int  # query lanes of a tile: tokens times heads
    n: int  # keys of a block
    num_warps: int  # warps of a program
    num_stages: int  # stages of the load pipeline: num_stages - 1 blocks of keys are loaded ahead


# These tables are indexed by the larger of key and value size, rounded up to a power of two, and by the bytes of an element. A
# Hopper multiprocessor has 227 KiB of shared memory and 64 Ki registers; wgmma takes 64 query lanes per warp group. No entry
# spills registers on sm_90.
WIDE_BLOCKS: dict[tuple[int, int], Blocks] = {  # for prompts that fill the device
    (64, 2): Blocks(128, 128, 8, 3),
    (128, 2): Blocks(128, 64, 8, 3),
    (256, 2): Blocks(128, 32, 8, 3),
    (512, 2): Blocks(32, 32, 8, 2),
    (1024, 2): Blocks(16, 16, 8, 2),
    (64, 4): Blocks(64, 32, 8, 2),
    (128, 4): Blocks(32, 16, 8, 2),
    (256, 4): Blocks(16, 32, 8, 2),
}
NARROW_BLOCKS: dict[tuple[int, int], Blocks] = {  # for shorter prompts
    (64, 2): Blocks(64, 64, 4, 3),
    (128, 2): Blocks(64, 64, 4, 3),
    (256, 2): Blocks(64, 32, 8, 3),
    (512, 2): Blocks(32, 32, 8, 2),
    (1024, 2): Blocks(16, 16, 8, 2),
    (64, 4): Blocks(32, 32, 8, 2),
    (128, 4): Blocks(16, 16, 4, 2),
    (256, 4): Blocks(16, 32, 8, 2),
}
DECODE_BLOCKS: dict[tuple[int, int], Blocks] = {  # for rows of one token: 32 KiB per stage, three programs per multiprocessor
    (64, 2): Blocks(16, 128, 4, 3),
    (128, 2): Blocks(16, 64, 4, 3),
    (256, 2): Blocks(16, 32, 4, 3),
    (512, 2): Blocks(16, 32, 8, 2),
    (1024, 2): Blocks(16, 16, 8, 2),
    (64, 4): Blocks(16, 32, 8, 2),
    (128, 4): Blocks(16, 32, 8, 2),
    (256, 4): Blocks(16, 32, 8, 2),
}
SMALLEST_BLOCKS = Blocks(16, 16, 8, 1)  # for sizes that are in no table
SHARED_MEMORY = 227 * 1024  # bytes of shared memory of a program on Hopper
# Largest need of the tables: that of WIDE_BLOCKS[256, 2] on sm_80 to sm_89. A program has 163 KiB on sm_80, and 99 KiB on sm_86,
# sm_89 and sm_120. All other blocks of 2-byte elements need at most 98 KiB.
LARGEST_NEED = 136 * 1024
MAX_DECODE_LANES = 64  # most query heads of a program; its results fit the registers if heads have at most WIDEST elements
WIDEST = 256


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the attention heads of one layer."""

    num_kv_heads: int  # key/value heads, G
    group: int  # query heads per key/value head, H / G
    head_dim: int  # columns of a key, D
    value_dim: int  # columns of a value, E
    itemsize: int  # bytes of an element
    shared_memory: int = SHARED_MEMORY  # bytes of shared memory that a program may use, see shared_memory_of()

    @property
    def size(self) -> int:
        """Number of columns to which a program pads keys and values, at least 64."""
        return max(64, int(triton.next_power_of_2(max(self.head_dim, self.value_dim))))

    def blocks(self, table: dict[tuple[int, int], Blocks]) -> Blocks:
        """Returns the blocks of these heads, with fewer lanes and stages if the device has too little shared memory for them."""
        blocks = table.get((self.size, self.itemsize), SMALLEST_BLOCKS)
        if (self.size, self.itemsize) != (256, 2) or self.shared_memory >= LARGEST_NEED:
            return blocks
        return replace(blocks, m=min(blocks.m, 64), num_stages=min(blocks.num_stages, 2))


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of attention_kernel over rows first_row .. first_row + num_rows - 1.

    There are three ways to split the keys of a tile:

    - even: each tile has `splits` splits, the grid's second axis.
    - dealt (extra > 0): each row has one split, and the device deals `extra` additional splits to the longest rows.
      `splits` is 1.
    - fixed: splits have min_blocks blocks each and begin at multiples of their size, so that a token's result does not depend on
      the launch. A tile has at most split_capacity splits. Program i of a tile's `splits` programs computes the splits i,
      i + splits, …; if `splits` is 0, one program computes all splits.
    """

    first_row: int
    num_rows: int
    one_token: bool  # whether every row has one token
    blocks: Blocks
    heads: int  # query heads of a tile
    tiles: int  # upper bound of the number of tiles of tokens
    programs: int  # first axis of the grid
    splits: int  # even: splits of a tile; dealt: 1; fixed: programs of a tile; 0: one program computes the whole tile
    min_blocks: int  # fixed: blocks of keys of a split; even and dealt: smallest number of blocks for which a split is planned
    extra: int = 0  # number of dealt splits beyond one per row; 0: splits are not dealt
    fixed: bool = False  # whether splits are fixed
    split_capacity: int = 0  # largest number of fixed splits of a tile

    @property
    def dealt_programs(self) -> int:
        """Number of programs that compute dealt splits."""
        return self.programs // (self.tiles + self.extra) * self.extra

    @property
    def scratch_lanes(self) -> int:
        """Query lanes for which the scratch needs memory.

        With dealt splits, this is twice the number of lanes, because each row with dealt splits also stores its first split.
        """
        if self.extra:
            return 2 * self.dealt_programs * self.blocks.m
        return self.programs * (self.split_capacity or self.splits) * self.blocks.m if self.splits > 1 else 0

    @property
    def counters(self) -> int:
        """Counters that AttentionScratch.arrivals needs."""
        if self.extra:
            return self.dealt_programs
        return self.programs if self.splits > 1 else 0


def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; 4 for other devices, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shared_memory_of(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may use on a GPU; SHARED_MEMORY for other devices."""
    if device.type != "cuda":
        return SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_MEMORY))


def choose_splits(programs: int, wanted: int, max_context: int) -> int:
    """Returns the number of splits per tile with which a launch of `programs` tiles has about `wanted` programs.

    The number is at most max_context / SPLIT_POSITIONS, rounded up. The last split may be shorter than SPLIT_POSITIONS.
    """
    return max(min(round(wanted / programs), -(-max_context // SPLIT_POSITIONS), MAX_SPLITS), 1)


def reach(max_context: int, window: int) -> int:
    """Returns the largest number of positions to which a token attends."""
    return min(max_context, window) if window else max_context


def scratch_bounds(shape: HeadShape, multiprocessors: int) -> tuple[int, int]:
    """Returns (scratch_lanes, counters) that no plan of plan_decode() or plan_extend() exceeds.

    - A plan without splits needs no scratch.
    - A split plan of plan_extend() has at most 4/3 of EXTEND_PROGRAMS programs per multiprocessor. The worst case of the
      rounding is 1.5 splits per tile, which become 2.
    - A plan of plan_decode() for several rows has at least one dealt split. This split adds the programs of one row, which may be
      more than DECODE_PROGRAMS per multiprocessor.
    """
    row = plan_decode(shape, 0, 1, 1, multiprocessors)
    dealt = max(DECODE_PROGRAMS * multiprocessors, row.programs)
    narrow = shape.blocks(NARROW_BLOCKS).m * (EXTEND_PROGRAMS * multiprocessors * 4 // 3 + 1)
    return max(2 * dealt * row.blocks.m, narrow), dealt


def plan_decode(shape: HeadShape, first_row: int, num_rows: int, max_context: int, multiprocessors: int) -> Launch:
    """Plans a launch for rows of one token.

    The plan does not depend on the rows' lengths. A graph is captured with the largest num_rows and max_context.

    A single row gets even splits. For several rows, the device deals the splits by the rows' lengths, which the host does not
    have. Without dealt splits, a single program would have to read a long row among many short rows.
    """
    blocks = shape.blocks(DECODE_BLOCKS)
    heads = min(shape.group, MAX_DECODE_LANES if shape.size <= WIDEST else MIN_DOT)
    lanes = max(triton.next_power_of_2(heads), MIN_DOT)
    across = shape.num_kv_heads * -(-shape.group // heads)
    wanted = DECODE_PROGRAMS * multiprocessors
    of_row = choose_splits(across, wanted, max_context) if num_rows == 1 else 1
    longest = min(-(-max_context // SPLIT_POSITIONS), MAX_SPLITS)
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
        min_blocks=max(SPLIT_POSITIONS // blocks.n, 1),
        extra=extra,
    )


def plan_extend(shape: HeadShape, num_rows: int, num_tokens: int, max_context: int, multiprocessors: int) -> Launch:
    """Plans a launch for rows 0 .. num_rows - 1 with num_tokens tokens in total.

    Tiles are wide if the rows fill wide tiles and these tiles fill the device. Otherwise, tiles are narrow, and their keys are
    split if the narrow tiles alone do not fill the device.
    """
    wide = _tiled(shape, shape.blocks(WIDE_BLOCKS), num_rows, num_tokens, 0)
    narrow = _tiled(shape, shape.blocks(NARROW_BLOCKS), num_rows, num_tokens, 1)
    if wide.programs >= multiprocessors and num_tokens * shape.group > num_rows * narrow.blocks.m:
        return wide
    splits = choose_splits(narrow.programs, EXTEND_PROGRAMS * multiprocessors, max_context)
    return _tiled(shape, narrow.blocks, num_rows, num_tokens, splits)


def fixed_split_size(max_context: int) -> int:
    """Returns the number of positions of a fixed split, so that max_context positions have at most FIXED_SPLITS whole splits."""
    return max(FIXED_POSITIONS, int(triton.next_power_of_2(-(-max_context // FIXED_SPLITS))))


def plan_fixed(
    shape: HeadShape,
    num_rows: int,
    num_tokens: int,
    max_context: int,
    split_size: int,
    multiprocessors: int,
    one_token: bool = False,
) -> Launch:
    """Plans a launch with fixed splits, in which a token's result does not depend on the launch.

    Args:
        shape: sizes of the heads.
        num_rows: number of rows, which may have any numbers of tokens.
        num_tokens: tokens of all rows.
        max_context: longest context of these rows, or the window if the window is shorter.
        split_size: positions of a split, from fixed_split_size(); equal in all launches of a worker.
        multiprocessors: multiprocessors of the device.
        one_token: whether every row has one token; a tile is then a row.
    """
    blocks = shape.blocks(NARROW_BLOCKS)
    whole = _fixed(shape, blocks, num_rows, num_tokens, split_size, one_token)
    if not one_token and num_tokens * shape.group > num_rows * blocks.m:
        wide = _fixed(shape, _doubled(blocks), num_rows, num_tokens, split_size, one_token)
        if wide.programs >= multiprocessors:
            return wide
    capacity = _most_fixed_splits(max_context, split_size, whole.blocks)
    wanted = EXTEND_PROGRAMS * multiprocessors // whole.programs
    if wanted <= 1 or max_context <= split_size:
        return whole
    return replace(whole, splits=min(wanted, capacity), split_capacity=capacity)


def fixed_scratch_bounds(shape: HeadShape, max_context: int, multiprocessors: int) -> tuple[int, int]:
    """Returns (scratch_lanes, counters) that no plan of plan_fixed() exceeds."""
    programs = EXTEND_PROGRAMS * multiprocessors // 2  # plan_fixed() splits no plan with more programs
    blocks = shape.blocks(NARROW_BLOCKS)
    return programs * _most_fixed_splits(max_context, fixed_split_size(max_context), blocks) * blocks.m, programs


def _most_fixed_splits(positions_seen: int, split_size: int, blocks: Blocks) -> int:
    """Returns the largest number of splits of a tile whose tokens attend to `positions_seen` positions each.

    All tokens of a tile together attend to at most blocks.m more positions than one token. A window that begins inside a split
    needs one more split.
    """
    return -(-(positions_seen + blocks.m) // split_size) + 1


def _doubled(blocks: Blocks) -> Blocks:
    """Returns blocks with twice the lanes and twice the warps if each warp has 16 lanes, otherwise `blocks`.

    With 16 lanes per warp, each lane adds in the same order as with `blocks`, so results have the same bits.
    """
    return replace(blocks, m=2 * blocks.m, num_warps=2 * blocks.num_warps) if blocks.m == 16 * blocks.num_warps else blocks


def _fixed(shape: HeadShape, blocks: Blocks, num_rows: int, num_tokens: int, split_size: int, one_token: bool) -> Launch:
    launch = replace(_tiled(shape, blocks, num_rows, num_tokens, 0), min_blocks=split_size // blocks.n, fixed=True)
    if not one_token:
        return launch
    return replace(launch, one_token=True, tiles=num_rows, programs=launch.programs // launch.tiles * num_rows)


def _tiled(shape: HeadShape, blocks: Blocks, num_rows: int, num_tokens: int, splits: int) -> Launch:
    heads = min(shape.group, blocks.m)
    tiles = num_tokens // (blocks.m // heads) + num_rows
    programs = tiles * shape.num_kv_heads * -(-shape.group // heads)
    return Launch(0, num_rows, False, blocks, heads, tiles, programs, splits, max(SPLIT_POSITIONS // blocks.n, 1))


def retiled(shape: HeadShape, launch: Launch, blocks: Blocks, splits: int, num_tokens: int) -> Launch:
    """Returns a plan for the same work as `launch`, with other block sizes and `splits` even splits per tile.

    If `splits` is 0, one program computes the whole tile.
    """
    if launch.one_token:
        programs = launch.programs // (launch.tiles + launch.extra) * launch.tiles
        min_blocks = max(SPLIT_POSITIONS // blocks.n, 1)
        return replace(launch, programs=programs, extra=0, blocks=blocks, splits=splits, min_blocks=min_blocks)
    return _tiled(shape, blocks, launch.num_rows, num_tokens, splits)
