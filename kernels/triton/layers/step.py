"""Prepares a step: page tables, input tokens, page indices. One program computes a row, a part of a row, or an update.

Columns are slices of larger buffers, so the alignment of their addresses changes from step to step, and counts change as well.
With do_not_specialize_on_alignment and do_not_specialize, Triton compiles no variants of a kernel for alignments and counts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, misfit, require_contiguous
from rootstock_llm.kernels.contracts.step_ops import DevicePageTableUpdates

UPDATE_BLOCK, FEW_TOKENS, MANY_TOKENS, INDEX_BLOCK, INDEX_PARTS = 128, 32, 512, 256, 8
ROW_COLUMNS = ["slots", "starts", "num_tokens", "offsets"]


@triton.jit(do_not_specialize_on_alignment=["slots", "firsts", "counts", "offsets", "pages"])
def _update_table_kernel(table, slots, firsts, counts, offsets, pages, width, BLOCK: tl.constexpr):
    update = tl.program_id(0)
    slot = tl.load(slots + update)
    count = tl.load(counts + update)
    if slot >= 0:
        first = tl.load(firsts + update)
        offset = tl.load(offsets + update)
        row = table + slot.to(tl.int64) * width
        for begin in range(0, count, BLOCK):
            steps = begin + tl.arange(0, BLOCK)
            entries = first + steps
            inside = (steps < count) & (entries >= 0) & (entries < width)
            tl.store(row + entries, tl.load(pages + offset + steps, mask=inside, other=0), mask=inside)


@triton.jit(
    do_not_specialize=["num_extend"],
    do_not_specialize_on_alignment=[*ROW_COLUMNS, "input_ids", "positions", "locations", "given", "known", "unwritten"],
)
def _resolve_tokens_kernel(
    input_ids,
    positions,
    locations,
    table,
    slots,
    starts,
    num_tokens,
    offsets,
    given,
    known,
    relay,
    unwritten,
    num_extend,
    vocab_size,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTS: tl.constexpr,
    HAS_KNOWN: tl.constexpr,
):
    row = tl.program_id(0)
    steps = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(num_tokens + row)
    if tl.program_id(1) * BLOCK < count:
        slot = tl.load(slots + row)
        tokens = tl.load(offsets + row) + steps
        relays = row >= num_extend
        exists = steps < count
        relayed = steps < tl.where(relays, count, 0)
        given_here = steps < tl.where(relays, 0, count)
        position = tl.load(starts + row) + steps
        logical = position // PAGE_SIZE
        inside = exists & (position >= 0) & (logical < tl.where(slot >= 0, width, 0))
        page = tl.load(table + slot.to(tl.int64) * width + logical, mask=inside, other=-1).to(tl.int64)
        location = tl.where(page >= 0, page * PAGE_SIZE + (position - logical * PAGE_SIZE), -1)
        tl.store(positions + tokens, position, mask=exists)
        tl.store(locations + tokens, location, mask=exists)
        last_token = tl.load(relay + slot, mask=relays & (slot >= 0), other=0)
        given_ids = tl.load(given + tokens, mask=given_here, other=0).to(tl.int64)
        if HAS_KNOWN:
            known_ids = tl.load(known + tokens, mask=relayed, other=-1).to(tl.int64)
            given_ids = tl.where(relayed, known_ids, given_ids)
            relayed = relayed & (known_ids < 0)
        ids = tl.where(relayed, last_token, given_ids)
        if COUNTS:
            missing = tl.sum((relayed & (ids < 0)).to(tl.int32), axis=0)
            tl.atomic_add(unwritten, missing, mask=missing > 0)
        tl.store(input_ids + tokens, tl.minimum(tl.maximum(ids, 0), vocab_size - 1), mask=exists)


@triton.jit(do_not_specialize_on_alignment=["out", "indptr", "slots"])
def _page_indices_kernel(out, indptr, table, slots, width, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - begin
    slot = tl.load(slots + row)
    for first in range(tl.program_id(1) * BLOCK, count, PARTS * BLOCK):
        entries = first + tl.arange(0, BLOCK)
        wanted = entries < count
        known = wanted & (entries < tl.where(slot >= 0, width, 0))
        page = tl.load(table + slot.to(tl.int64) * width + entries, mask=known, other=0)
        tl.store(out + begin + entries, tl.maximum(page, 0), mask=wanted)


def update_page_table(table: Tensor, updates: DevicePageTableUpdates) -> None:
    """Implements StepKernels.update_page_table(). Raises ValueError if the shapes do not fit."""
    columns = (updates.slots, updates.firsts, updates.counts, updates.offsets)
    require_contiguous(table, *columns, updates.pages)
    if len({len(column) for column in columns}) > 1:
        raise misfit(*columns)
    if len(updates.slots) == 0:
        return
    _update_table_kernel[(len(updates.slots),)](table, *columns, updates.pages, table.shape[1], BLOCK=UPDATE_BLOCK, num_warps=1)


def resolve_tokens(
    input_ids: Tensor,
    rows: RaggedRows,
    given: Tensor,
    relay: Tensor,
    unwritten: Tensor | None,
    num_extend: int,
    page_size: int,
    vocab_size: int,
    max_tokens: int,
    known: Tensor | None = None,
) -> None:
    """Implements StepKernels.resolve_tokens() in one launch. Raises ValueError if the shapes do not fit."""
    require_contiguous(input_ids, rows.positions, rows.locations, rows.page_table, relay)
    if len(rows.positions) != len(input_ids) or len(rows.locations) != len(input_ids):
        raise misfit(input_ids, rows.positions, rows.locations)
    if known is not None and len(known) != len(input_ids):
        raise misfit(input_ids, known)
    if len(rows.slots) == 0 or max_tokens < 1:
        return
    block = FEW_TOKENS if max_tokens <= FEW_TOKENS else MANY_TOKENS
    _resolve_tokens_kernel[(len(rows.slots), triton.cdiv(max_tokens, block))](
        input_ids,
        rows.positions,
        rows.locations,
        rows.page_table,
        rows.slots,
        rows.starts,
        rows.num_tokens,
        rows.offsets,
        given,
        given if known is None else known,
        relay,
        rows.slots if unwritten is None else unwritten,
        num_extend,
        vocab_size,
        rows.page_table.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=block,
        COUNTS=unwritten is not None,
        HAS_KNOWN=known is not None,
        num_warps=1 if block == FEW_TOKENS else 4,
    )


def page_indices(out: Tensor, indptr: Tensor, rows: RaggedRows) -> None:
    """Implements StepKernels.page_indices(). Raises ValueError if the shapes do not fit."""
    require_contiguous(out, indptr, rows.page_table)
    if len(indptr) != len(rows.slots) + 1:
        raise misfit(indptr, rows.slots)
    if len(rows.slots) == 0:
        return
    width = rows.page_table.shape[1]
    parts = max(min(triton.cdiv(width, INDEX_BLOCK), INDEX_PARTS), 1)
    _page_indices_kernel[(len(rows.slots), parts)](
        out, indptr, rows.page_table, rows.slots, width, BLOCK=INDEX_BLOCK, PARTS=parts, num_warps=1
    )
