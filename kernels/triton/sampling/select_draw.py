"""Implements the last stage of select_tokens(), with one program per row.

For a greedy row, the program takes the token with the largest maximum of the row's spans. For a row that is not greedy, it draws
among few tokens (select_candidates) or, if many tokens remain after the cuts, from the whole row (select_wide).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.contracts.row_fault import RowFault
from rootstock_llm.kernels.contracts.sample_ops import MAX_COUNT, SlotColumn
from rootstock_llm.kernels.triton.sampling.select_candidates import STEPS, draw_candidates, gather, group_keys
from rootstock_llm.kernels.triton.sampling.select_keys import (
    GREEDY,
    KEY_END,
    LIKELIEST,
    MIN_P,
    NO_KEY,
    NUCLEUS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WHOLE,
    drawn_mass,
    int_param,
    kind_of,
    least,
    min_p_key,
    nucleus_goal,
    real_param,
    uniform_of,
)
from rootstock_llm.kernels.triton.sampling.select_peaks import ROW_COLUMNS, is_finite
from rootstock_llm.kernels.triton.sampling.select_rounds import first_bracket, first_pivots, row_of, sigma_key
from rootstock_llm.kernels.triton.sampling.select_scratch import CANDIDATES, PIVOTS, ROUNDS
from rootstock_llm.kernels.triton.sampling.select_wide import cut_row, walk

COUNTS = tl.constexpr(int(SlotColumn.COUNTS))
NAN_LOGITS = tl.constexpr(int(RowFault.NAN_LOGITS))
NO_TOKEN_ALLOWED = tl.constexpr(int(RowFault.NO_TOKEN_ALLOWED))
COUNT_BITS = tl.constexpr(MAX_COUNT)


@triton.jit
def candidate_bound(
    slot_params, slot, kind, counts, masses, group_tops, num_groups, peak, temperature, near, GROUPS: tl.constexpr
):  # fmt: skip
    """Returns a key that bounds the candidates of a row, and the mass of the row.

    Args:
        near: the largest key that remains after top-n-sigma.

    Returns:
        (high, whole). All tokens that remain after the cuts have keys up to `high`. For top-k, `high` is the key of the k-th most
        likely group maximum, or a slightly larger key. If more than CANDIDATES tokens may remain, `high` is below 0. `whole` is
        the mass of the row if `kind` is NUCLEUS, otherwise 0.
    """
    whole = tl.zeros((), tl.int64)
    high = tl.full((), -1, tl.int32)
    if kind == LIKELIEST:
        top_k = int_param(slot_params, slot, TOP_K)
        if top_k <= CANDIDATES:
            keys = group_keys(group_tops, num_groups, peak, temperature, GROUPS)
            high = least(keys, tl.full((GROUPS,), 1, tl.int32), top_k, -1, KEY_END, 4 + top_k // 4, STEPS)
    if kind == NUCLEUS:
        weighed = tl.load(masses + tl.arange(0, PIVOTS))
        whole = tl.max(weighed)
        goal = nucleus_goal(whole, real_param(slot_params, slot, TOP_P))
        found = tl.load(counts + tl.arange(0, PIVOTS))
        _, bound, _, _, number, _ = first_bracket(first_pivots(near), found, weighed, 1, goal)
        if number <= CANDIDATES:
            high = bound
    return tl.minimum(high, near), whole


@triton.jit
def draw_row(
    source, slot_params, slot, kind, peak, near, position, group_tops, tile_masses, counts, masses, pivots, near_groups, keys,
    ids, vocab_size, num_groups, TILE: tl.constexpr, TALLY_TILE: tl.constexpr, TALLIES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns the token of a row that is not greedy. `near` is the largest key that remains after top-n-sigma."""
    temperature = real_param(slot_params, slot, TEMPERATURE)
    uniform = uniform_of(int_param(slot_params, slot, SEED_LOW), int_param(slot_params, slot, SEED_HIGH), position)
    high, whole = candidate_bound(
        slot_params, slot, kind, counts, masses, group_tops, num_groups, peak, temperature, near, GROUPS
    )
    number = tl.zeros((), tl.int32) + (CANDIDATES + 1)
    if high >= 0:
        number = gather(source, group_tops, num_groups, vocab_size, peak, temperature, high, near_groups, keys, ids, GROUPS)
    token = tl.zeros((), tl.int32)
    if number <= CANDIDATES:
        lanes = tl.arange(0, CANDIDATES)
        among = tl.load(keys + lanes, mask=lanes < number, other=NO_KEY)
        named = tl.load(ids + lanes, mask=lanes < number, other=0)
        token = draw_candidates(among, named, number, slot_params, slot, kind, whole, uniform, vocab_size)
    else:
        begin = tl.zeros((), tl.int32)
        passed = tl.zeros((), tl.int64)
        drawn = tl.zeros((), tl.int64)
        limit = tl.minimum(near, min_p_key(real_param(slot_params, slot, MIN_P)))
        quota = tl.zeros((), tl.int64) + vocab_size
        if kind == WHOLE:
            tiles = tl.arange(0, TALLIES)
            each = tl.load(tile_masses + tiles, mask=tiles < tl.cdiv(vocab_size, TALLY_TILE), other=0)
            drawn = drawn_mass(uniform, tl.sum(each))
            tally = tl.sum((tl.cumsum(each) <= drawn).to(tl.int32))
            passed = tl.sum(tl.where(tiles < tally, each, 0))
            begin = tally * (TALLY_TILE // TILE)
        else:
            limit, quota, total = cut_row(
                source, vocab_size, peak, temperature, near, slot_params, slot, kind, counts, masses, pivots, TILE
            )
            drawn = drawn_mass(uniform, total)
        token = walk(source, begin, passed, drawn, limit, quota, vocab_size, peak, temperature, TILE)
    return token


@triton.jit
def count_token(counts, slot_params, slot, token, vocab_size):
    if int_param(slot_params, slot, COUNTS) != 0:
        target = counts + slot.to(tl.int64) * vocab_size + token
        count = tl.load(target)
        if (count.to(tl.int32) & COUNT_BITS) < COUNT_BITS:
            tl.store(target, count + 1)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=[*ROW_COLUMNS, "tokens", "faults"])
def draw_kernel(
    tokens, faults, relay, seen, logits, edited, slot_params, slots, positions, mask_rows, loss_offsets, tops, raw_tops, top_ids,
    spreads, group_tops, tile_masses, counts, masses, pivots, near_groups, candidate_keys, candidate_ids, vocab_size, num_groups,
    max_parts, num_parts, TILE: tl.constexpr, TALLY_TILE: tl.constexpr, PARTS: tl.constexpr, TALLIES: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(tokens + row, 0)
        tl.store(faults + row, 0)
        return
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    here = tl.load(tops + row * max_parts + parts, mask=inside, other=float("-inf"))
    peak = tl.max(here)
    raw_peak = tl.max(tl.load(raw_tops + row * max_parts + parts, mask=inside, other=float("-inf")))
    fault = tl.where(is_finite(peak), 0, NO_TOKEN_ALLOWED)
    fault = tl.where(is_finite(raw_peak), fault, NAN_LOGITS)
    token = tl.zeros((), tl.int32)
    if fault == 0:
        kind = kind_of(slot_params, slot, vocab_size)
        if kind == GREEDY:
            best = tl.load(top_ids + row * max_parts + parts, mask=inside, other=vocab_size)
            token = tl.min(tl.where(here == peak, best, vocab_size))
        else:
            source = row_of(logits, edited, slot_params, slot, positions, mask_rows, loss_offsets, row, vocab_size)
            sums = row * ROUNDS * PIVOTS
            near = sigma_key(slot_params, slot, spreads, row, max_parts, real_param(slot_params, slot, TEMPERATURE), PARTS)
            token = draw_row(
                source, slot_params, slot, kind, peak, near, tl.load(positions + row), group_tops + row.to(tl.int64) * num_groups,
                tile_masses + row * tl.cdiv(vocab_size, TALLY_TILE), counts + sums, masses + sums, pivots + row * PIVOTS,
                near_groups + row * CANDIDATES, candidate_keys + row * CANDIDATES, candidate_ids + row * CANDIDATES,
                vocab_size, num_groups, TILE, TALLY_TILE, TALLIES, GROUPS,
            )  # fmt: skip
        tl.store(relay + slot, token.to(tl.int64))
        count_token(seen, slot_params, slot, token, vocab_size)
    tl.store(tokens + row, token)
    tl.store(faults + row, fault)
