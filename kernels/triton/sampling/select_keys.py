"""Defines keys and masses, the integers with which the draw computes.

A sum of integers does not depend on the order of its terms, so results do not depend on the division of a row between programs.

- The **key** of a token has the bits of a float32: the distance of its logit from the row's maximum, divided by the temperature.
  Keys have the order of these floats, because they are not negative. The most likely token has key 0.
- The **mass** of a token is exp(-distance / temperature) as an integer, in units of 2 ** -44. An int64 can hold the sum of
  MAX_VOCAB masses. A token with less than one unit has mass 0 and is not drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rootstock_llm.kernels.contracts.sample_ops import SlotColumn

MAX_VOCAB = (1 << 19) - 1
KEY_END = tl.constexpr(0x41F80000)  # bits of 31.0: a token with a larger key has mass 0
NO_KEY = tl.constexpr(0x7F800000)  # bits of infinity
ONE = tl.constexpr(float(1 << 44))

WIDTH = tl.constexpr(int(SlotColumn.WIDTH))
SEED_LOW = tl.constexpr(int(SlotColumn.SEED_LOW))
SEED_HIGH = tl.constexpr(int(SlotColumn.SEED_HIGH))
TEMPERATURE = tl.constexpr(int(SlotColumn.TEMPERATURE))
TOP_K = tl.constexpr(int(SlotColumn.TOP_K))
TOP_P = tl.constexpr(int(SlotColumn.TOP_P))
MIN_P = tl.constexpr(int(SlotColumn.MIN_P))
TOP_N_SIGMA = tl.constexpr(int(SlotColumn.TOP_N_SIGMA))
EDITED_UNTIL = tl.constexpr(int(SlotColumn.EDITED_UNTIL))

GREEDY = tl.constexpr(0)
WHOLE = tl.constexpr(1)  # neither top-k nor top-p; top-n-sigma and min-p are possible
LIKELIEST = tl.constexpr(2)  # top-k; all other cuts are possible
NUCLEUS = tl.constexpr(3)  # top-p without top-k; top-n-sigma and min-p are possible


@triton.jit
def real_param(slot_params, slot, COLUMN: tl.constexpr):
    return tl.load(slot_params + slot.to(tl.int64) * WIDTH + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def int_param(slot_params, slot, COLUMN: tl.constexpr):
    return tl.load(slot_params + slot.to(tl.int64) * WIDTH + COLUMN)


@triton.jit
def is_edited(slot_params, slot, positions, mask_rows, loss_offsets, row):
    """Whether edit_logits() fills the row."""
    until = int_param(slot_params, slot, EDITED_UNTIL)
    lost = tl.load(loss_offsets + row + 1) > tl.load(loss_offsets + row)
    return (tl.load(positions + row) < until) | (tl.load(mask_rows + row) >= 0) | lost


@triton.jit
def kind_of(slot_params, slot, vocab_size):
    """Returns how the slot's token is chosen: GREEDY, WHOLE, LIKELIEST or NUCLEUS."""
    top_k = int_param(slot_params, slot, TOP_K)
    kind = tl.where(real_param(slot_params, slot, TOP_P) < 1.0, NUCLEUS, WHOLE)
    kind = tl.where((top_k > 0) & (top_k < vocab_size), LIKELIEST, kind)
    return tl.where(real_param(slot_params, slot, TEMPERATURE) > 0.0, kind, GREEDY)


@triton.jit
def key_of(x, peak, temperature):
    """Returns the int32 keys of logits x <= peak.

    A key is the bits of a negated result of rootstock_llm.kernels.reference.sampling.tempered().
    """
    return tl.div_rn(peak - x, temperature + tl.zeros_like(x)).to(tl.int32, bitcast=True)


@triton.jit
def mass_of(key):
    """Returns the int64 mass of a key."""
    chance = tl.exp(-key.to(tl.float32, bitcast=True))
    return tl.where(key <= KEY_END, chance * ONE, 0.0).to(tl.int64)


@triton.jit
def min_p_key(min_p):
    """Returns the largest key that remains after min-p."""
    below = 0.0 - tl.log(tl.where(min_p > 0.0, min_p, 1.0).to(tl.float64))
    key = tl.maximum(below.to(tl.float32).to(tl.int32, bitcast=True), 0)
    return tl.where(min_p > 0.0, tl.minimum(key, KEY_END), KEY_END)


@triton.jit
def nucleus_goal(total, top_p):
    """Returns the smallest mass that is at least top_p times the total. It is at least 1, so that one token remains."""
    exact = total.to(tl.float64) * top_p.to(tl.float64)
    goal = exact.to(tl.int64)
    goal += (goal.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(tl.minimum(goal, total), 1)


@triton.jit
def mixed(value):
    """Applies the finalizer of splitmix64 to a uint64; see rootstock_llm.kernels.reference.sampling."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform_of(seed_low, seed_high, position):
    """Returns a float64 in [0, 1), a function of only the seed and the position."""
    low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    stream = mixed(seed + golden)
    bits = mixed(stream + (position.to(tl.uint64) + 1) * golden)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def least(values, weights, goal, low, high, slack, PIVOTS: tl.constexpr):
    """Returns the smallest v in low + 1 .. high - 1 for which the weights of values up to v reach the goal, otherwise high.

    Args:
        values: int32[n].
        weights: integers [n].
        goal: sum to reach.
        low: lower bound, exclusive.
        high: upper bound, inclusive.
        slack: -1: the exact result. 0 or more: the search may end at a larger v if the weights up to this v exceed the goal by at
            most `slack`.
    """
    steps = tl.arange(0, PIVOTS).to(tl.int64) + 1
    low = low + tl.zeros((), tl.int32)
    high = high + tl.zeros((), tl.int32)
    excess = tl.full((), 1 << 62, tl.int64)
    while (high - low > 1) & (excess > slack):
        pivots = low + ((high - low).to(tl.int64) * steps // (PIVOTS + 1)).to(tl.int32)
        pivots = tl.maximum(pivots, low + 1)
        sums = tl.sum(tl.where(values[None, :] <= pivots[:, None], weights[None, :], 0), axis=1).to(tl.int64)
        enough = sums >= goal
        high = tl.min(tl.where(enough, pivots, high))
        excess = tl.min(tl.where(enough, sums - goal, excess))
        low = tl.max(tl.where(enough, low, pivots))
    return high


@triton.jit
def drawn_mass(uniform, total):
    """Returns an int64 below the total. The drawn token is the first token whose cumulated mass exceeds this number."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def equals_kept(goal, below, mass):
    """Returns how many of the equally likely tokens at the edge of a nucleus belong to the nucleus.

    This is the smallest number with which the nucleus reaches the goal, and at least 1.

    Args:
        goal: mass that the nucleus must reach.
        below: mass of all more likely tokens.
        mass: mass of each of the equally likely tokens.
    """
    return tl.maximum((goal - below + mass - 1) // tl.maximum(mass, 1), 1)
