"""Device functions of attention over pages: online softmax in float32 (flash attention 2), in base 2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, c, UPCAST: tl.constexpr):
    """c + a @ b in float32. UPCAST: operands widen first, for where half types cannot be multiplied."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def load_rows(base, offsets, inside, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[len(offsets), BLOCK] of DIM elements each; 0 where not inside (looked at if MASKED) and from DIM on."""
    columns = tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        if DIM == BLOCK:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        if DIM == BLOCK:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def fold_keys(
    acc,
    total,
    peak,
    q,
    k_head,
    v_head,
    table,
    begin,
    end,
    positions,
    window,
    score_scale,
    cap_scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Takes places begin .. end - 1 of a sequence into acc [M, E], total [M] and peak [M], all of them float32.

    Not MASKED: every query sees every place, and end - begin is a multiple of BLOCK_N. MASKED: nothing is read from `end` on;
    with CAUSAL a query sees the places up to its position, and the last `window` of them alone with HAS_WINDOW.
    """
    lanes = tl.arange(0, BLOCK_N)
    # Page ids are loaded one block ahead and carried: the loads of keys then depend on no load of their own iteration, and
    # the compiler's pipeline spends all its stages on keys and values.
    pages = tl.load(table + (begin + lanes) // PAGE_SIZE, mask=begin + lanes < end, other=0)
    for first in range(begin, end, BLOCK_N):
        places = first + lanes
        inside = places < end
        page = tl.maximum(pages, 0).to(tl.int64) * (NUM_KV_HEADS * PAGE_SIZE)
        place = page + places % PAGE_SIZE
        k = load_rows(k_head, place * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, MASKED)
        # Values are masked too: 0 times what lies beyond the end could be NaN.
        v = load_rows(v_head, place * VALUE_DIM, inside, VALUE_DIM, BLOCK_E, MASKED)
        ahead = places + BLOCK_N
        pages = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)

        scores = dot(q, tl.trans(k), None, UPCAST) * score_scale
        if HAS_SOFTCAP:
            scores = cap_scale * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (places[None, :] <= positions[:, None])
                if HAS_WINDOW:
                    seen = seen & (places[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, 1))
        # Under a window a query may have seen nothing yet, and -inf less -inf is NaN.
        level = tl.where(raised == float("-inf"), 0.0, raised) if MASKED and CAUSAL else raised
        weights = tl.exp2(scores - level[:, None])
        kept = tl.exp2(peak - level)
        total = total * kept + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * kept[:, None], UPCAST)
        peak = raised
    return acc, total, peak


@triton.jit
def fold_tile(
    q,
    k_head,
    v_head,
    table,
    lower,
    upper,
    begin,
    end,
    position,
    positions,
    window,
    score_scale,
    cap_scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """(acc [M, E], total [M], peak [M]) of places lower .. upper - 1, out of the begin .. end - 1 that the tile's tokens see.

    position: the first token's. With ONE_TOKEN it is the only one, and sees them all, or with ROUNDED all but those before its
    window.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    # fmt: off
    if ONE_TOKEN:
        acc, total, peak = fold_keys(
            acc, total, peak, q, k_head, v_head, table, lower, upper, positions, window, score_scale, cap_scale,
            NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_E,
            True, ROUNDED and HAS_WINDOW, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )
    else:
        # Three stretches: cut by the window's lower edge, seen by every token of the tile, cut by causality.
        opened = begin
        if HAS_WINDOW:
            opened += tl.cdiv(tl.maximum(end - window - begin, 0), BLOCK_N) * BLOCK_N
        closed = tl.maximum(begin + tl.maximum(position + 1 - begin, 0) // BLOCK_N * BLOCK_N, opened)
        if HAS_WINDOW:
            acc, total, peak = fold_keys(
                acc, total, peak, q, k_head, v_head, table, lower, tl.minimum(opened, upper), positions, window,
                score_scale, cap_scale,
                NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_E,
                True, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
            )
        acc, total, peak = fold_keys(
            acc, total, peak, q, k_head, v_head, table, tl.maximum(opened, lower), tl.minimum(closed, upper), positions,
            window, score_scale, cap_scale,
            NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_E,
            False, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )
        acc, total, peak = fold_keys(
            acc, total, peak, q, k_head, v_head, table, tl.maximum(closed, lower), upper, positions, window,
            score_scale, cap_scale,
            NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_E,
            True, True, HAS_WINDOW, HAS_SOFTCAP, UPCAST,
        )
    # fmt: on
    return acc, total, peak
