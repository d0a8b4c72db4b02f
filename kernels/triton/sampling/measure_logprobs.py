"""Measures log probabilities in two launches: each program measures a span of a row, then one program per row merges the spans.

A candidate for the top log probabilities is packed into one int64. Its upper half has the bits of the logit, changed so that
integers have the order of the floats. Its lower half has the inverted id, so that among equal logits the lowest id is the
greatest candidate. One maximum therefore finds both value and id, and no two candidates are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import misfit, require_contiguous
from rootstock_llm.kernels.contracts.sample_ops import MAX_TOP as MOST_TOP
from rootstock_llm.kernels.contracts.sample_ops import Measured

TILE, TILES_OF_SPAN = 2048, 4
MAX_TOP = tl.constexpr(MOST_TOP)
NOTHING = tl.constexpr(-(1 << 63))  # value below every candidate, even below the candidate of the logit -inf


@dataclass(frozen=True, slots=True)
class MeasureScratch:
    """Results of the spans of n rows. A span has TILES_OF_SPAN tiles."""

    peaks: Tensor  # float32[n, spans], largest logit
    sums: Tensor  # float32[n, spans], sum of exp(logit - peak)
    top: Tensor  # int64[n, spans, MAX_TOP], the largest packed candidates of the span, in any order

    @classmethod
    def of(cls, max_rows: int, vocab_size: int, device: torch.device) -> MeasureScratch:
        spans = triton.cdiv(vocab_size, TILE * TILES_OF_SPAN)
        return cls(
            torch.empty((max_rows, spans), dtype=torch.float32, device=device),
            torch.empty((max_rows, spans), dtype=torch.float32, device=device),
            torch.empty((max_rows, spans, MAX_TOP.value), dtype=torch.int64, device=device),
        )


@triton.jit
def packed(x, ids):
    """Packs float32 x and its ids into int64; the module's docstring explains the format."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def value_of(pack):
    ordered = (pack >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def id_of(pack):
    return 0x7FFFFFFF - (pack & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def exp_below(x, peak):
    """Returns exp(x - peak). If x is -inf, returns 0 even if peak is -inf."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - peak))


@triton.jit(do_not_specialize_on_alignment=["rows", "logits"])
def span_kernel(logits, rows, peaks, sums, top, vocab_size, NUM_TOP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
                MAX_TOP: tl.constexpr):  # fmt: skip
    index, span = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + index)
    if row < 0:
        return
    span_index = index * tl.num_programs(1) + span
    lanes = tl.arange(0, MAX_TOP)
    best = NOTHING + lanes.to(tl.int64)  # distinct values, so that a candidate that replaces the smallest value changes one lane
    best = tl.where(lanes < NUM_TOP, best, 0x7FFFFFFFFFFFFFFF)  # lanes from NUM_TOP on are never the smallest, so never replaced
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    first = span * TILES
    for tile in range(first, tl.minimum(first + TILES, tl.cdiv(vocab_size, TILE))):
        ids = tile * TILE + tl.arange(0, TILE)
        inside = ids < vocab_size
        x = tl.load(logits + row.to(tl.int64) * vocab_size + ids, mask=inside, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(x))
        total = total * exp_below(peak, higher) + exp_below(x, higher)
        peak = higher
        if NUM_TOP > 0:
            packs = tl.where(inside, packed(x, ids), NOTHING)
            next_best, worst = tl.max(packs), tl.min(best)
            while next_best > worst:
                best = tl.where(best == worst, next_best, best)
                packs = tl.where(packs == next_best, NOTHING, packs)
                next_best, worst = tl.max(packs), tl.min(best)
    tl.store(peaks + span_index, peak)
    tl.store(sums + span_index, tl.sum(total))
    if NUM_TOP > 0:
        tl.store(top + span_index * MAX_TOP + lanes, best)


@triton.jit(do_not_specialize_on_alignment=["rows", "tokens", "logits", "own", "mass_out", "top_ids_out", "top_out"])
def merge_kernel(own, mass_out, top_ids_out, top_out, logits, tokens, rows, peaks, sums, top, vocab_size, num_spans,
                 NUM_TOP: tl.constexpr, SPANS: tl.constexpr, MAX_TOP: tl.constexpr):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index)
    if row < 0:
        return
    spans = tl.arange(0, SPANS)
    inside = spans < num_spans
    span_peaks = tl.load(peaks + index * num_spans + spans, mask=inside, other=float("-inf"))
    peak = tl.max(span_peaks)
    scaled = tl.load(sums + index * num_spans + spans, mask=inside, other=0.0) * exp_below(span_peaks, peak)
    mass = tl.log(tl.sum(scaled)) + peak
    tl.store(mass_out + index, mass)
    token = tl.load(tokens + index)
    known = (token >= 0) & (token < vocab_size)
    x = tl.load(logits + row.to(tl.int64) * vocab_size + token, mask=known, other=0.0)
    tl.store(own + index, tl.where(known, x - mass, float("-inf")))
    if NUM_TOP > 0:
        indices = tl.arange(0, SPANS * MAX_TOP)
        wanted = (indices // MAX_TOP < num_spans) & (indices % MAX_TOP < NUM_TOP)
        packs = tl.load(top + index * num_spans * MAX_TOP + indices, mask=wanted, other=NOTHING)
        for rank in range(NUM_TOP):
            best = tl.max(packs)
            packs = tl.where(packs == best, NOTHING, packs)
            found = rank < vocab_size
            tl.store(top_ids_out + index * NUM_TOP + rank, tl.where(found, id_of(best), -1))
            tl.store(top_out + index * NUM_TOP + rank, tl.where(found, value_of(best) - mass, float("-inf")))


def measure_logprobs(out: Measured, logits: Tensor, tokens: Tensor, rows: Tensor, scratch: MeasureScratch) -> None:
    """Implements SampleKernels.measure_logprobs(). The scratch limits the number of rows per launch."""
    vocab_size, num_top = logits.shape[1], out.top_ids.shape[1]
    spans, size = triton.cdiv(vocab_size, TILE * TILES_OF_SPAN), len(scratch.peaks)
    if spans != scratch.peaks.shape[1] or num_top > MAX_TOP.value or out.top.shape != out.top_ids.shape:
        raise misfit(logits, out.top_ids, out.top, scratch.peaks)
    require_contiguous(logits, out.own, out.top_ids, out.top, out.mass, tokens, rows)
    for begin in range(0, len(rows), size):
        part = slice(begin, min(begin + size, len(rows)))
        count = part.stop - begin
        span_kernel[(count, spans)](
            logits, rows[part], scratch.peaks, scratch.sums, scratch.top, vocab_size, num_top, TILE, TILES_OF_SPAN, MAX_TOP.value,
            num_warps=8,
        )  # fmt: skip
        merge_kernel[(count,)](
            out.own[part], out.mass[part], out.top_ids[part], out.top[part], logits, tokens[part], rows[part], scratch.peaks,
            scratch.sums, scratch.top, vocab_size, spans, num_top, triton.next_power_of_2(spans), MAX_TOP.value, num_warps=4,
        )  # fmt: skip
