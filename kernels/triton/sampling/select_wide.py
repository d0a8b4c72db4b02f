"""Draws from many tokens. One program reads the whole row several times.

The program narrows the bracket (see select_rounds) until one key is left in it, first for top-k and then for top-p. The draw then
reads the row in the order of the ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.triton.sampling.select_keys import (
    KEY_END,
    MIN_P,
    NUCLEUS,
    TOP_K,
    TOP_P,
    equals_kept,
    int_param,
    mass_of,
    min_p_key,
    nucleus_goal,
    real_param,
)
from rootstock_llm.kernels.triton.sampling.select_rounds import (
    first_bracket,
    first_pivots,
    keys_of_tile,
    measure,
    narrowed,
    next_pivots,
)
from rootstock_llm.kernels.triton.sampling.select_scratch import PIVOTS


@triton.jit
def search(
    source, vocab_size, peak, temperature, by_mass, goal, low, high, count_low, mass_low, count_high, mass_high,
    TILE: tl.constexpr,
):  # fmt: skip
    """Narrows the bracket until `high` is the only key in it."""
    while high - low > 1:
        short = goal - tl.where(by_mass != 0, mass_low, count_low)
        excess = tl.where(by_mass != 0, mass_high, count_high) - goal
        pivots = next_pivots(low, high, short, excess)
        counts, masses, near, far = measure(
            source, 0, tl.cdiv(vocab_size, TILE), vocab_size, peak, temperature, pivots, low, high, TILE
        )
        low, high, count_low, mass_low, count_high, mass_high = narrowed(
            pivots, counts, masses, by_mass, goal, low, high, count_low, mass_low, count_high, mass_high
        )
        low = tl.maximum(low, near - 1)  # there is no key between `low` and `near`
        high = tl.minimum(high, far)
    return low, high, count_low, mass_low, count_high, mass_high


@triton.jit
def cut_row(
    source, vocab_size, peak, temperature, near, slot_params, slot, kind, counts, masses, last_pivots, TILE: tl.constexpr
):  # fmt: skip
    """Returns (limit, quota, mass) of a row.

    After the cuts, these tokens remain: all tokens with keys below `limit` and, of the tokens with key `limit`, those with the
    `quota` lowest ids. `mass` is the mass of all remaining tokens.

    Args:
        near: the largest key that remains after top-n-sigma.
        counts: int32[ROUNDS, PIVOTS] of the row, if `kind` is NUCLEUS.
        masses: int64[ROUNDS, PIVOTS] of the row, if `kind` is NUCLEUS.
        last_pivots: int32[PIVOTS], pivots of the last round.
    """
    top_p = real_param(slot_params, slot, TOP_P)
    num_tiles = tl.cdiv(vocab_size, TILE)
    pivots = first_pivots(near)
    if kind == NUCLEUS:
        found, weighed = tl.load(counts + tl.arange(0, PIVOTS)), tl.load(masses + tl.arange(0, PIVOTS))
        by_mass = tl.full((), 1, tl.int32)
        goal = nucleus_goal(tl.max(weighed), top_p)
    else:
        found, weighed, _, _ = measure(source, 0, num_tiles, vocab_size, peak, temperature, pivots, -1, KEY_END, TILE)
        by_mass = tl.full((), 0, tl.int32)
        goal = tl.minimum(int_param(slot_params, slot, TOP_K), tl.max(found)).to(tl.int64)
    low, high, count_low, mass_low, count_high, mass_high = first_bracket(pivots, found, weighed, by_mass, goal)
    if kind == NUCLEUS:
        pivots = tl.load(last_pivots + tl.arange(0, PIVOTS))
        found = tl.load(counts + PIVOTS + tl.arange(0, PIVOTS))
        weighed = tl.load(masses + PIVOTS + tl.arange(0, PIVOTS))
        low, high, count_low, mass_low, count_high, mass_high = narrowed(
            pivots, found, weighed, by_mass, goal, low, high, count_low, mass_low, count_high, mass_high
        )
    quota = tl.zeros((), tl.int64)
    kept = tl.zeros((), tl.int64)
    more = tl.full((), 1, tl.int32)
    while more != 0:
        low, high, count_low, mass_low, count_high, mass_high = search(
            source, vocab_size, peak, temperature, by_mass, goal, low, high, count_low, mass_low, count_high, mass_high, TILE
        )
        quota = tl.where(by_mass != 0, equals_kept(goal, mass_low, mass_of(high)), goal - count_low)
        kept = mass_low + quota * mass_of(high)
        more = ((by_mass == 0) & (top_p < 1.0)).to(tl.int32)
        if more != 0:
            by_mass = tl.full((), 1, tl.int32)
            goal = nucleus_goal(kept, top_p)
            low = tl.full((), -1, tl.int32)
            count_low = tl.zeros((), tl.int32)
            mass_low = tl.zeros((), tl.int64)
    least_likely = min_p_key(real_param(slot_params, slot, MIN_P))
    if least_likely < high:
        high = least_likely
        quota = tl.zeros((), tl.int64) + vocab_size
        pivots = tl.zeros((PIVOTS,), tl.int32) + high
        _, weighed, _, _ = measure(source, 0, num_tiles, vocab_size, peak, temperature, pivots, -1, KEY_END, TILE)
        kept = tl.max(weighed)
    return high, quota, kept


@triton.jit
def walk(source, tile, passed, drawn, limit, quota, vocab_size, peak, temperature, TILE: tl.constexpr):
    """Returns the first token, from `tile` on, whose cumulated mass exceeds `drawn`. The mass before the tile is `passed`."""
    token = tl.zeros((), tl.int32)
    equals = tl.zeros((), tl.int64)
    while (passed <= drawn) & (tile < tl.cdiv(vocab_size, TILE)):
        _, keys = keys_of_tile(source, tile, vocab_size, peak, temperature, TILE)
        level = (keys == limit).to(tl.int64)
        kept = (keys < limit) | ((keys == limit) & (equals + tl.cumsum(level) <= quota))
        masses = tl.where(kept, mass_of(keys), 0)
        running = passed + tl.cumsum(masses)
        token = tile * TILE + tl.sum((running <= drawn).to(tl.int32))
        passed += tl.sum(masses)
        equals += tl.sum(level)
        tile += 1
    return token
