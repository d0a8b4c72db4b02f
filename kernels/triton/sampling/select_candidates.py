"""Draws among few tokens (the candidates), which one program has in registers.

The program finds the candidates by the maxima of groups of tokens, so that it reads only a small part of the row. All cuts and
the draw use least(), which searches for the smallest key or id up to which the sum of the weights reaches a goal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.triton.sampling.select_keys import (
    KEY_END,
    LIKELIEST,
    MIN_P,
    NO_KEY,
    TOP_K,
    TOP_P,
    drawn_mass,
    equals_kept,
    int_param,
    key_of,
    least,
    mass_of,
    min_p_key,
    nucleus_goal,
    real_param,
)
from rootstock_llm.kernels.triton.sampling.select_scratch import CANDIDATES, GROUP

STEPS = tl.constexpr(4)  # pivots per step of a search
BATCH = tl.constexpr(16)  # groups that are read at a time


@triton.jit
def group_keys(group_tops, num_groups, peak, temperature, GROUPS: tl.constexpr):
    """Returns the keys of the groups' maxima, int32[GROUPS]."""
    groups = tl.arange(0, GROUPS)
    return key_of(tl.load(group_tops + groups, mask=groups < num_groups, other=float("-inf")), peak, temperature)


@triton.jit
def gather(
    source, group_tops, num_groups, vocab_size, peak, temperature, high, near_groups, keys_out, ids_out, GROUPS: tl.constexpr
):  # fmt: skip
    """Stores the keys and ids of at most CANDIDATES tokens with keys up to `high`.

    Returns:
        The number of tokens with keys up to `high`, if all of them were stored. Otherwise, a number above CANDIDATES.
    """
    near = group_keys(group_tops, num_groups, peak, temperature, GROUPS) <= high
    num_near = tl.sum(near.to(tl.int32))
    total = tl.zeros((), tl.int32) + (CANDIDATES + 1)
    if num_near <= CANDIDATES:
        tl.store(near_groups + tl.cumsum(near.to(tl.int32)) - 1, tl.arange(0, GROUPS), mask=near)
        tl.debug_barrier()
        total = tl.zeros((), tl.int32)
        begin = tl.zeros((), tl.int32)
        lanes = tl.arange(0, BATCH * GROUP)
        while (begin < num_near) & (total <= CANDIDATES):
            indices = begin + lanes // GROUP
            ids = tl.load(near_groups + indices, mask=indices < num_near, other=0) * GROUP + lanes % GROUP
            wanted = (indices < num_near) & (ids < vocab_size)
            keys = key_of(tl.load(source + ids, mask=wanted, other=float("-inf")), peak, temperature)
            kept = keys <= high
            after = total + tl.cumsum(kept.to(tl.int32))
            kept = kept & (after <= CANDIDATES)
            tl.store(keys_out + after - 1, keys, mask=kept)
            tl.store(ids_out + after - 1, ids, mask=kept)
            total = tl.max(after)
            begin += BATCH
        tl.debug_barrier()
    return total


@triton.jit
def first_of_equals(kept, keys, ids, limit, quota, vocab_size):
    """Removes the tokens with keys above `limit` from `kept`. Of the tokens with key `limit`, the `quota` lowest ids remain."""
    level = kept & (keys == limit)
    kept = kept & (keys <= limit)
    if tl.sum(level.to(tl.int64)) > quota:
        last = least(ids, level.to(tl.int64), quota, -1, vocab_size, -1, STEPS)
        kept = kept & ((keys < limit) | (ids <= last))
    return kept


@triton.jit
def draw_candidates(keys, ids, number, slot_params, slot, kind, whole, uniform, vocab_size):
    """Returns the drawn token.

    Args:
        keys: int32[CANDIDATES], of which the first `number` are valid.
        ids: int32[CANDIDATES], the tokens of these keys.
        number: number of candidates.
        whole: total mass, of which top-p is a share; used only if `kind` is NUCLEUS.
    """
    kept = tl.arange(0, CANDIDATES) < number
    keys = tl.where(kept, keys, NO_KEY)
    masses = tl.where(kept, mass_of(keys), 0)
    if kind == LIKELIEST:
        count = tl.minimum(int_param(slot_params, slot, TOP_K), number).to(tl.int64)
        limit = least(keys, kept.to(tl.int64), count, -1, KEY_END, 0, STEPS)
        quota = count - tl.sum((keys < limit).to(tl.int64))
        kept = first_of_equals(kept, keys, ids, limit, quota, vocab_size)
        whole = tl.sum(tl.where(kept, masses, 0))
    top_p = real_param(slot_params, slot, TOP_P)
    if top_p < 1.0:
        masses = tl.where(kept, masses, 0)
        goal = nucleus_goal(whole, top_p)
        limit = least(keys, masses, goal, -1, KEY_END, -1, STEPS)
        quota = equals_kept(goal, tl.sum(tl.where(keys < limit, masses, 0)), mass_of(limit))
        kept = first_of_equals(kept, keys, ids, limit, quota, vocab_size)
    kept = kept & (keys <= min_p_key(real_param(slot_params, slot, MIN_P)))
    masses = tl.where(kept, masses, 0)
    return least(ids, masses, drawn_mass(uniform, tl.sum(masses)) + 1, -1, vocab_size - 1, -1, STEPS)
