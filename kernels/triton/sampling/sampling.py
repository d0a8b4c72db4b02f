"""Implements SampleKernels with the Triton kernels. select_tokens() does not sort the vocabulary."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import misfit, require_contiguous
from rootstock_llm.kernels.contracts.sample_ops import Measured, SampleRows, SlotTable
from rootstock_llm.kernels.triton.sampling import edit_logits, measure_logprobs
from rootstock_llm.kernels.triton.sampling.measure_logprobs import MeasureScratch
from rootstock_llm.kernels.triton.sampling.select_draw import draw_kernel
from rootstock_llm.kernels.triton.sampling.select_keys import MAX_VOCAB
from rootstock_llm.kernels.triton.sampling.select_peaks import peaks_kernel
from rootstock_llm.kernels.triton.sampling.select_rounds import round_kernel, tally_kernel
from rootstock_llm.kernels.triton.sampling.select_scratch import GROUP, PEAK_TILE, ROUNDS, TALLY_TILE, TILE, SelectScratch

PROGRAMS = 528  # approximate number of programs of a launch over all rows: four per multiprocessor of a large GPU


def tiles_of_each(num_rows: int, num_tiles: int) -> int:
    """Returns the number of tiles per program with which a launch over num_rows rows has about PROGRAMS programs."""
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
    """Implements SampleKernels.select_tokens() in five launches.

    Raises:
        ValueError: there are more rows than the scratch has, or the scratch was allocated for another vocabulary.
    """
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


class TritonSampling:
    """The Triton sampling kernels and their scratch memory. All calls must be on the same stream."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocates the scratch. Raises ValueError if the vocabulary is too large.

        Args:
            max_rows: largest number of rows of a call of select_tokens().
            vocab_size: number of token ids.
            device: the device of all tensors.
        """
        self._select = SelectScratch.of(max_rows, vocab_size, device)
        self._measure = MeasureScratch.of(max_rows, vocab_size, device)

    def edit_logits(self, edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
        edit_logits.edit_logits(edited, logits, rows, table)

    def select_tokens(
        self,
        tokens: Tensor,
        faults: Tensor,
        logits: Tensor,
        edited: Tensor,
        rows: SampleRows,
        table: SlotTable,
        relay: Tensor,
    ) -> None:
        select_tokens(tokens, faults, logits, edited, rows, table, relay, self._select)

    def measure_logprobs(self, out: Measured, logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
        measure_logprobs.measure_logprobs(out, logits, tokens, rows, self._measure)
