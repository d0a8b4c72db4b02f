"""Computes attention to blocks of keys with an online softmax (FlashAttention-2, arXiv 2307.08691, section 3.1).

The softmax is computed in float32 and base 2.

Letters in shapes: M = BLOCK_M query lanes, N = BLOCK_N keys, E = BLOCK_E columns of values. A lane is one query head of one
token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, c, UPCAST: tl.constexpr):
    """Returns c + a @ b in float32. UPCAST converts the operands first, because the interpreter cannot multiply bfloat16."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def load_rows(base, offsets, inside, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Loads [len(offsets), BLOCK] elements. Columns from DIM on are 0. With MASKED, rows that are not `inside` are 0."""
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
    """Adds positions begin .. end - 1 of a sequence to `acc` [M, E], `total` [M] and `peak` [M], which are float32.

    `acc` is the weighted sum of the values, `total` is the sum of the weights, and `peak` is the largest score. A weight is
    exp2(score - peak).

    Args:
        acc: float32[M, E].
        total: float32[M].
        peak: float32[M].
        q: [M, BLOCK_D].
        k_head: pointer to the head's first key in the pool [P, G, S, D].
        v_head: pointer to the head's first value in the pool [P, G, S, E].
        table: pointer to the row's page ids, int32.
        begin: first position.
        end: last position + 1.
        positions: int32[M], position of each query.
        window: number of last positions to which a query attends, with HAS_WINDOW.
        score_scale: factor of the scores, which includes log2(e) or, with HAS_SOFTCAP, 1 / softcap.
        cap_scale: softcap * log2(e), with HAS_SOFTCAP.
        MASKED: if False, every query attends to every position, and end - begin is a multiple of BLOCK_N. If True, positions from
            `end` on are not read.
        CAUSAL: with MASKED, whether a query attends only to positions up to its own, within its window.
    """
    lanes = tl.arange(0, BLOCK_N)
    # Page ids are loaded one block ahead, so that loads of keys do not depend on a load of the same iteration. The compiler then
    # uses all stages of its pipeline for keys and values.
    pages = tl.load(table + (begin + lanes) // PAGE_SIZE, mask=begin + lanes < end, other=0)
    for first in range(begin, end, BLOCK_N):
        key_positions = first + lanes
        inside = key_positions < end
        if MASKED and CAUSAL and HAS_WINDOW:  # pages before all windows may already belong to another request
            inside = inside & (key_positions > tl.min(positions, 0) - window)
        page = tl.maximum(pages, 0).to(tl.int64) * (NUM_KV_HEADS * PAGE_SIZE)
        cells = page + key_positions % PAGE_SIZE
        k = load_rows(k_head, cells * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, MASKED)
        # Values are also masked, because memory outside of the range may contain NaN, and a weight of 0 times NaN is NaN.
        v = load_rows(v_head, cells * VALUE_DIM, inside, VALUE_DIM, BLOCK_E, MASKED)
        ahead = key_positions + BLOCK_N
        pages = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end, other=0)

        scores = dot(q, tl.trans(k), None, UPCAST) * score_scale
        if HAS_SOFTCAP:
            scores = cap_scale * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (key_positions[None, :] <= positions[:, None])
                if HAS_WINDOW:
                    seen = seen & (key_positions[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, 1))
        # With a window, a query may have attended to no key yet. Its peak is then -inf, and -inf - -inf would be NaN.
        level = tl.where(raised == float("-inf"), 0.0, raised) if MASKED and CAUSAL else raised
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * fade[:, None], UPCAST)
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
    """Computes (acc [M, E], total [M], peak [M]) of positions lower .. upper - 1 for one tile of queries.

    Args:
        lower: first position of the split.
        upper: last position + 1 of the split.
        begin: first position to which a token of the tile attends.
        end: last position to which a token of the tile attends, + 1.
        position: position of the tile's first token.
        ONE_TOKEN: whether the tile has one token, which attends to all positions of the split that are not before its window.
        ROUNDED: with ONE_TOKEN, whether the split may begin before the token's window.

    The other arguments are those of fold_keys().
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
        # Three ranges of positions: some queries' windows begin in the first range; all queries attend to the second range; some
        # queries do not attend to all of the third range, because some of its positions are after theirs.
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
