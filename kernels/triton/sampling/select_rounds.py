"""Measures rows that draw from many tokens: the middle stages of select_tokens(). The grid is rows by spans of tiles.

The key and the mass of a token are defined in select_keys: the most likely token has key 0, and less likely tokens have larger
keys. Top-k and top-p leave the tokens whose key is at most a limit. The search for this limit narrows a bracket of two keys,
low < high. The measure (count or mass) of the tokens with keys up to `low` is below a goal, and the measure of those with keys up
to `high` reaches the goal.

For rows with top-p and without top-k, all programs narrow the bracket in two rounds. The second round does nothing if, after the
first round, at most CANDIDATES tokens have keys up to `high`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.triton.sampling.select_keys import (
    KEY_END,
    MIN_P,
    NO_KEY,
    NUCLEUS,
    TEMPERATURE,
    TOP_N_SIGMA,
    TOP_P,
    WHOLE,
    is_edited,
    key_of,
    kind_of,
    mass_of,
    min_p_key,
    nucleus_goal,
    real_param,
)
from rootstock_llm.kernels.triton.sampling.select_peaks import ROW_COLUMNS, is_finite
from rootstock_llm.kernels.triton.sampling.select_scratch import CANDIDATES, PIVOTS, ROUNDS


@triton.jit
def keys_of_tile(source, tile, vocab_size, peak, temperature, TILE: tl.constexpr):
    """Returns the ids and keys of a tile's tokens, with NO_KEY beyond the vocabulary."""
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf"))
    return ids, key_of(x, peak, temperature)


@triton.jit
def first_pivots(near):
    """Returns int32[PIVOTS]: keys with growing gaps between them, over the range of keys with nonzero masses.

    No pivot exceeds `near`, and the last pivot is `near`.
    """
    steps = tl.arange(0, PIVOTS).to(tl.float32)
    pivots = tl.where(steps < PIVOTS - 1, (1.0 + 1.25 * steps + 0.125 * steps * steps).to(tl.int32, bitcast=True), KEY_END)
    return tl.minimum(pivots, near)


@triton.jit
def next_pivots(low, high, short, excess):
    """Returns int32[PIVOTS]: keys inside the bracket, most of them near the estimated limit.

    The estimate is the key at which the measure would reach the goal if it grew linearly from `low` to `high`. The widest gap
    between two pivots is at most half of the bracket.

    Args:
        low: lower key of the bracket.
        high: upper key of the bracket.
        short: goal minus the measure up to `low`.
        excess: measure up to `high`, minus the goal.
    """
    share = short.to(tl.float32) / tl.maximum((short + excess).to(tl.float32), 1.0)
    steps = tl.arange(0, PIVOTS)
    width = 0.5 / (1 << (2 * (steps % (PIVOTS // 2)))).to(tl.float32)
    offsets = tl.where(steps < PIVOTS // 2, share * (1.0 - width), share + (1.0 - share) * width)
    pivots = low + (offsets * (high - low).to(tl.float32)).to(tl.int32)
    return tl.minimum(tl.maximum(pivots, low + 1), high - 1)


@triton.jit
def measure(source, first, last, vocab_size, peak, temperature, pivots, low, high, TILE: tl.constexpr):
    """Measures the tokens in tiles first to last - 1 against the pivots.

    Returns:
        int32[PIVOTS] and int64[PIVOTS]: number and total mass of the tokens whose key is at most each pivot. Then the smallest
        key above `low`, or NO_KEY without such a key, and the largest key up to `high`, or -1 without such a key.
    """
    counts = tl.zeros((PIVOTS, TILE), tl.int32)
    masses = tl.zeros((PIVOTS, TILE), tl.int64)
    near = tl.full((TILE,), NO_KEY, tl.int32)
    far = tl.full((TILE,), -1, tl.int32)
    for tile in tl.range(first, last, num_stages=3):
        _, keys = keys_of_tile(source, tile, vocab_size, peak, temperature, TILE)
        under = keys[None, :] <= pivots[:, None]
        counts += under.to(tl.int32)
        masses += tl.where(under, mass_of(keys)[None, :], 0)
        near = tl.minimum(near, tl.where(keys > low, keys, NO_KEY))
        far = tl.maximum(far, tl.where(keys <= high, keys, -1))
    return tl.sum(counts, axis=1), tl.sum(masses, axis=1), tl.min(near), tl.max(far)


@triton.jit
def narrowed(pivots, counts, masses, by_mass, goal, low, high, count_low, mass_low, count_high, mass_high):
    """Narrows the bracket by the measures of the pivots. Returns the bracket with the counts and masses up to its two keys."""
    enough = tl.where(by_mass != 0, masses, counts.to(tl.int64)) >= goal
    high = tl.min(tl.where(enough, pivots, high))
    count_high = tl.min(tl.where(enough, counts, count_high))
    mass_high = tl.min(tl.where(enough, masses, mass_high))
    low = tl.max(tl.where(enough, low, pivots))
    count_low = tl.max(tl.where(enough, count_low, counts))
    mass_low = tl.max(tl.where(enough, mass_low, masses))
    return low, high, count_low, mass_low, count_high, mass_high


@triton.jit
def first_bracket(pivots, counts, masses, by_mass, goal):
    """Returns the bracket that the measures of the first pivots determine. Tokens with keys above the last pivot are cut."""
    low, high = tl.full((), -1, tl.int32), tl.full((), KEY_END, tl.int32)
    none, no_mass = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    return narrowed(pivots, counts, masses, by_mass, goal, low, high, none, no_mass, tl.max(counts), tl.max(masses))


@triton.jit
def row_of(logits, edited, slot_params, slot, positions, mask_rows, loss_offsets, row, vocab_size):
    """Returns the pointer to the logits, raw or edited, from which the row is sampled."""
    source = logits + row.to(tl.int64) * vocab_size
    if is_edited(slot_params, slot, positions, mask_rows, loss_offsets, row):
        source = edited + row.to(tl.int64) * vocab_size
    return source


@triton.jit
def peak_of(tops, row, num_parts, max_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    return tl.max(tl.load(tops + row * max_parts + parts, mask=parts < num_parts, other=float("-inf")))


@triton.jit
def sigma_key(slot_params, slot, spreads, row, num_tiles, temperature, TILES: tl.constexpr):
    """Returns the largest key that remains after top-n-sigma. num_tiles is the number of the row's spreads."""
    deviations = real_param(slot_params, slot, TOP_N_SIGMA)
    key = tl.full((), KEY_END, tl.int32)
    if deviations > 0.0:
        tiles = tl.arange(0, TILES)
        inside = tiles < num_tiles
        offsets = spreads + row * 3 * num_tiles + tiles
        numbers = tl.load(offsets, mask=inside, other=0.0)
        means = tl.load(offsets + num_tiles, mask=inside, other=0.0)
        within = tl.sum(tl.load(offsets + 2 * num_tiles, mask=inside, other=0.0))
        number = tl.sum(numbers)
        away = means - tl.sum(numbers * means) / number
        sigma = tl.sqrt((within + tl.sum(numbers * away * away)) / number).to(tl.float32)
        key = tl.minimum(tl.div_rn(deviations * sigma, temperature).to(tl.int32, bitcast=True), KEY_END)
    return key


@triton.jit(do_not_specialize=["tiles_each", "num_parts"], do_not_specialize_on_alignment=ROW_COLUMNS)
def tally_kernel(
    logits, edited, slot_params, slots, positions, mask_rows, loss_offsets, tops, spreads, tile_masses, vocab_size, max_parts,
    num_parts, tiles_each, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stores the mass of each tile, for rows without top-k and top-p."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if kind_of(slot_params, slot, vocab_size) != WHOLE:
        return
    peak = peak_of(tops, row, num_parts, max_parts, PARTS)
    if is_finite(peak) == 0:
        return
    source = row_of(logits, edited, slot_params, slot, positions, mask_rows, loss_offsets, row, vocab_size)
    temperature = real_param(slot_params, slot, TEMPERATURE)
    limit = sigma_key(slot_params, slot, spreads, row, max_parts, temperature, PARTS)
    limit = tl.minimum(limit, min_p_key(real_param(slot_params, slot, MIN_P)))
    num_tiles = tl.cdiv(vocab_size, TILE)
    for tile in tl.range(part * tiles_each, tl.minimum((part + 1) * tiles_each, num_tiles), num_stages=3):
        _, keys = keys_of_tile(source, tile, vocab_size, peak, temperature, TILE)
        tl.store(tile_masses + row * num_tiles + tile, tl.sum(tl.where(keys <= limit, mass_of(keys), 0)))


@triton.jit(do_not_specialize=["tiles_each", "num_parts"], do_not_specialize_on_alignment=ROW_COLUMNS)
def round_kernel(
    logits, edited, slot_params, slots, positions, mask_rows, loss_offsets, tops, spreads, counts, masses, pivots_out, vocab_size,
    max_parts, num_parts, tiles_each, ROUND: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Measures counts and masses at the pivots, for rows with top-p and without top-k."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    if kind_of(slot_params, slot, vocab_size) != NUCLEUS:
        return
    peak = peak_of(tops, row, num_parts, max_parts, PARTS)
    if is_finite(peak) == 0:
        return
    temperature = real_param(slot_params, slot, TEMPERATURE)
    near = sigma_key(slot_params, slot, spreads, row, max_parts, temperature, PARTS)
    pivots = first_pivots(near)
    offsets = row * ROUNDS * PIVOTS + tl.arange(0, PIVOTS)
    if ROUND > 0:
        weighed = tl.load(masses + offsets)
        goal = nucleus_goal(tl.max(weighed), real_param(slot_params, slot, TOP_P))
        low, high, _, mass_low, count_high, mass_high = first_bracket(pivots, tl.load(counts + offsets), weighed, 1, goal)
        if count_high <= CANDIDATES:
            return
        pivots = next_pivots(low, high, goal - mass_low, mass_high - goal)
        if part == 0:  # stored for draw_kernel, which could round these floats differently
            tl.store(pivots_out + row * PIVOTS + tl.arange(0, PIVOTS), pivots)
    source = row_of(logits, edited, slot_params, slot, positions, mask_rows, loss_offsets, row, vocab_size)
    first = part * tiles_each
    last = tl.minimum(first + tiles_each, tl.cdiv(vocab_size, TILE))
    found, weighed, _, _ = measure(source, first, last, vocab_size, peak, temperature, pivots, -1, KEY_END, TILE)
    tl.atomic_add(counts + ROUND * PIVOTS + offsets, found)
    tl.atomic_add(masses + ROUND * PIVOTS + offsets, weighed)
