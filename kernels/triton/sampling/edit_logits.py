"""Edits logits: each program edits one block of one row's vocabulary, and returns at once if the row needs no edits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import misfit, require_contiguous
from rootstock_llm.kernels.contracts.sample_ops import MAX_COUNT, SampleRows, SlotColumn, SlotTable
from rootstock_llm.kernels.triton.sampling.select_keys import int_param, is_edited, real_param
from rootstock_llm.kernels.triton.sampling.select_peaks import ROW_COLUMNS

BLOCK, LIST_BLOCK = 4096, 128
REPETITION = tl.constexpr(int(SlotColumn.REPETITION))
FREQUENCY = tl.constexpr(int(SlotColumn.FREQUENCY))
PRESENCE = tl.constexpr(int(SlotColumn.PRESENCE))
STOPPED_UNTIL = tl.constexpr(int(SlotColumn.STOPPED_UNTIL))
NUM_BIASES = tl.constexpr(int(SlotColumn.NUM_BIASES))
NUM_STOPS = tl.constexpr(int(SlotColumn.NUM_STOPS))
COUNTS = tl.constexpr(int(SlotColumn.COUNTS))
WORDS = tl.constexpr(int(SlotColumn.WORDS))
COUNT_BITS = tl.constexpr(MAX_COUNT)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def penalized(x, counts, repetition, frequency, presence):
    """Applies repetition, frequency and presence penalties to x. Tokens with a count of 0 have no penalty.

    The float32 quotient and product are correctly rounded, so they equal the results of the reference, which rounds float64. A
    finite x does not become infinite.
    """
    scaled = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    finite = (x > float("-inf")) & (x < float("inf"))
    x = tl.where((counts != 0) & finite, scaled, x)
    outputs = counts & COUNT_BITS
    lost = outputs.to(tl.float64) * frequency.to(tl.float64) + presence.to(tl.float64)
    return tl.where(outputs > 0, x - lost.to(tl.float32), x)


@triton.jit
def allowed(words, ids, inside):
    """Returns whether the bits of `ids` are set in `words`, int32[ceil(V / 32)]."""
    return (tl.load(words + ids // 32, mask=inside, other=0) >> (ids % 32)) & 1 != 0


@triton.jit
def add_listed(row_out, ids, values, first, end, block, sign, BLOCK: tl.constexpr, LIST_BLOCK: tl.constexpr):
    """Adds sign * values[i] to the logit of ids[i], first <= i < end, for the ids in this program's block.

    The logit -inf of a forbidden token does not change.
    """
    for begin in range(first, end, LIST_BLOCK):
        indices = begin + tl.arange(0, LIST_BLOCK)
        token = tl.load(ids + indices, mask=indices < end, other=-1)
        value = tl.load(values + indices, mask=indices < end, other=0.0)
        mine = (token >= 0) & (token // BLOCK == block)
        tl.atomic_add(row_out + token, value * sign, mask=mine, sem="relaxed", scope="cta")


@triton.jit(do_not_specialize_on_alignment=[*ROW_COLUMNS, "loss_ids", "losses"])
def edit_kernel(
    edited,
    logits,
    slot_params,
    slots,
    positions,
    mask_rows,
    loss_offsets,
    loss_ids,
    losses,
    masks,
    counts,
    words,
    bias_ids,
    biases,
    stop_ids,
    vocab_size,
    num_words,
    max_biases,
    max_stops,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if is_edited(slot_params, slot, positions, mask_rows, loss_offsets, row) == 0:
        return
    wide_slot = slot.to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    x = tl.load(logits + row.to(tl.int64) * vocab_size + ids, mask=inside, other=0.0)
    if int_param(slot_params, slot, COUNTS) != 0:
        seen = tl.load(counts + wide_slot * vocab_size + ids, mask=inside, other=0).to(tl.int32)
        repetition = real_param(slot_params, slot, REPETITION)
        x = penalized(x, seen, repetition, real_param(slot_params, slot, FREQUENCY), real_param(slot_params, slot, PRESENCE))
    if int_param(slot_params, slot, WORDS) != 0:
        x = tl.where(allowed(words + wide_slot * num_words, ids, inside), x, float("-inf"))
    mask_row = tl.load(mask_rows + row)
    if mask_row >= 0:
        x = tl.where(allowed(masks + mask_row.to(tl.int64) * num_words, ids, inside), x, float("-inf"))
    row_out = edited + row.to(tl.int64) * vocab_size
    tl.store(row_out + ids, x, mask=inside)
    first, end = tl.load(loss_offsets + row), tl.load(loss_offsets + row + 1)
    num_biases = int_param(slot_params, slot, NUM_BIASES)
    num_stops = tl.where(
        tl.load(positions + row) < int_param(slot_params, slot, STOPPED_UNTIL), int_param(slot_params, slot, NUM_STOPS), 0
    )
    if first < end:
        tl.debug_barrier()
        add_listed(row_out, loss_ids, losses, first, end, block, -1.0, BLOCK, LIST_BLOCK)
    if num_biases > 0:
        tl.debug_barrier()
        none = tl.zeros((), tl.int32)
        add_listed(row_out, bias_ids + wide_slot * max_biases, biases + wide_slot * max_biases, none, num_biases, block, 1.0,
                   BLOCK, LIST_BLOCK)  # fmt: skip
    if num_stops > 0:
        tl.debug_barrier()
        for begin in range(0, num_stops, LIST_BLOCK):
            indices = begin + tl.arange(0, LIST_BLOCK)
            token = tl.load(stop_ids + wide_slot * max_stops + indices, mask=indices < num_stops, other=-1)
            mine = (token >= 0) & (token // BLOCK == block) & (token < vocab_size)
            tl.store(row_out + token, float("-inf"), mask=mine)


def edit_logits(edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
    """Implements SampleKernels.edit_logits(). Several biases of one id are added in any order."""
    num_rows, vocab_size = logits.shape
    num_words = triton.cdiv(vocab_size, 32)
    if edited.shape != logits.shape or table.counts.shape[1] != vocab_size or table.words.shape[1] != num_words:
        raise misfit(edited, logits, table.counts, table.words)
    if rows.masks.shape[0] and rows.masks.shape[1] != num_words:
        raise misfit(logits, rows.masks)
    require_contiguous(edited, logits, rows.masks, table.params, table.counts, table.words, table.bias_ids, table.biases)
    if num_rows:
        edit_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            edited, logits, table.params, rows.slots, rows.positions, rows.mask_rows, rows.loss_offsets, rows.loss_ids,
            rows.losses, rows.masks, table.counts, table.words, table.bias_ids, table.biases, table.stop_ids, vocab_size,
            num_words, table.bias_ids.shape[1], table.stop_ids.shape[1], BLOCK, LIST_BLOCK, num_warps=8,
        )  # fmt: skip
