"""select_tokens: its five launches. What is left after the cuts is found without sorting."""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.contracts.sample_ops import SampleRows, SlotTable
from kernels.triton.launch import misfit, require_contiguous
from kernels.triton.sampling.select_draw import draw_kernel
from kernels.triton.sampling.select_keys import MAX_VOCAB
from kernels.triton.sampling.select_peaks import peaks_kernel
from kernels.triton.sampling.select_rounds import round_kernel, tally_kernel
from kernels.triton.sampling.select_scratch import GROUP, PEAK_TILE, ROUNDS, TALLY_TILE, TILE, SelectScratch

PROGRAMS = 528  # aimed at by a launch over all rows: four for each multiprocessor of a large GPU


def tiles_of_each(num_rows: int, num_tiles: int) -> int:
    """Tiles that one program does, for about PROGRAMS of them in all."""
    return int(triton.cdiv(num_tiles, min(num_tiles, triton.cdiv(PROGRAMS, num_rows))))


def select_tokens(
    tokens: Tensor,
    faults: Tensor,
    logits: Tensor,
    edited: Tensor,
    rows: SampleRows,
    table: SlotTable,
    relay: Tensor,
    scratch: SelectScratch,
) -> None:
    """See kernels.contracts.sample_ops. Raises ValueError where there are more rows than the scratch has, or its vocabulary is
    another."""
    num_rows, vocab_size = logits.shape
    peak_tiles, num_tiles, tallies = (triton.cdiv(vocab_size, size) for size in (PEAK_TILE, TILE, TALLY_TILE))
    num_groups = triton.cdiv(vocab_size, GROUP.value)
    if num_rows > len(scratch.tops) or num_groups != scratch.group_tops.shape[1]:
        raise misfit(logits, scratch.tops, scratch.group_tops)
    if vocab_size > MAX_VOCAB or edited.shape != logits.shape or table.counts.shape[1] != vocab_size:
        raise misfit(logits, edited, table.counts)
    require_contiguous(logits, edited, relay, table.params, table.counts)
    if not num_rows:
        return
    shape = (vocab_size, scratch.tops.shape[1])
    inputs = (logits, edited, table.params, rows.slots, rows.positions, rows.mask_rows, rows.loss_offsets)
    each = tiles_of_each(num_rows, peak_tiles)
    num_parts, parts_block = triton.cdiv(peak_tiles, each), triton.next_power_of_2(shape[1])
    peaks_kernel[(num_rows, num_parts)](
        *inputs, scratch.tops, scratch.raw_tops, scratch.top_ids, scratch.spreads, scratch.group_tops, scratch.counts,
        scratch.masses, vocab_size, num_groups, shape[1], each, PEAK_TILE, num_warps=4,
    )  # fmt: skip
    each = tiles_of_each(num_rows, tallies)
    tally_kernel[(num_rows, triton.cdiv(tallies, each))](
        *inputs, scratch.tops, scratch.spreads, scratch.tile_masses, *shape, num_parts, each, TALLY_TILE, parts_block, num_warps=8
    )
    each = tiles_of_each(num_rows, num_tiles)
    for turn in range(ROUNDS.value):
        round_kernel[(num_rows, triton.cdiv(num_tiles, each))](
            *inputs, scratch.tops, scratch.spreads, scratch.counts, scratch.masses, scratch.pivots, *shape, num_parts, each, turn,
            TILE, parts_block, num_warps=8,
        )  # fmt: skip
    draw_kernel[(num_rows,)](
        tokens, faults, relay, table.counts, *inputs, scratch.tops, scratch.raw_tops, scratch.top_ids, scratch.spreads,
        scratch.group_tops, scratch.tile_masses, scratch.counts, scratch.masses, scratch.pivots, scratch.near_groups,
        scratch.candidate_keys, scratch.candidate_ids, vocab_size, num_groups, shape[1], num_parts, TILE, TALLY_TILE, parts_block,
        triton.next_power_of_2(tallies), triton.next_power_of_2(num_groups), num_warps=8,
    )  # fmt: skip
