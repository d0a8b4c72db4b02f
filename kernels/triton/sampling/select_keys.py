"""What the draw computes with, as integers, so that sums are the same however a row is divided among programs.

A token's key is how far its logit lies below the row's maximum, divided by the temperature, by the bits of that float32: keys
of 0 and above have the order of the floats, 0 is the likeliest. Its mass is exp(-key) in steps of 2 ** -44 of the likeliest
one's; 2 ** 18 of them fit an int64. Below 2 ** -44 it is 0, and such a token counts as not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.contracts.sample_ops import SlotColumn

MAX_VOCAB = 1 << 18
KEY_END = tl.constexpr(0x41F80000)  # the bits of 31.0: beyond it no token has any mass
NO_KEY = tl.constexpr(0x7F800000)  # infinity's
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
WHOLE = tl.constexpr(1)  # cut by top-n-sigma and min-p at the most
LIKELIEST = tl.constexpr(2)  # top-k, and then perhaps more cuts
NUCLEUS = tl.constexpr(3)  # top-p of the whole vocabulary, or of what top-n-sigma leaves, and then perhaps min-p


@triton.jit
def real_param(slot_params, slot, COLUMN: tl.constexpr):
    return tl.load(slot_params + slot.to(tl.int64) * WIDTH + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def int_param(slot_params, slot, COLUMN: tl.constexpr):
    return tl.load(slot_params + slot.to(tl.int64) * WIDTH + COLUMN)


@triton.jit
def is_edited(slot_params, slot, positions, mask_rows, loss_offsets, row):
    """Whether edit_logits fills the row."""
    until = int_param(slot_params, slot, EDITED_UNTIL)
    lost = tl.load(loss_offsets + row + 1) > tl.load(loss_offsets + row)
    return (tl.load(positions + row) < until) | (tl.load(mask_rows + row) >= 0) | lost


@triton.jit
def kind_of(slot_params, slot, vocab_size):
    """How the slot's token is chosen: GREEDY, WHOLE, LIKELIEST or NUCLEUS."""
    top_k = int_param(slot_params, slot, TOP_K)
    kind = tl.where(real_param(slot_params, slot, TOP_P) < 1.0, NUCLEUS, WHOLE)
    kind = tl.where((top_k > 0) & (top_k < vocab_size), LIKELIEST, kind)
    return tl.where(real_param(slot_params, slot, TEMPERATURE) > 0.0, kind, GREEDY)


@triton.jit
def key_of(x, peak, temperature):
    """int32, of logits at most at the peak. The same float32 that kernels.reference.draws.support cuts by, but for its sign."""
    return tl.div_rn(peak - x, temperature + tl.zeros_like(x)).to(tl.int32, bitcast=True)


@triton.jit
def mass_of(key):
    """int64."""
    chance = tl.exp(-key.to(tl.float32, bitcast=True))
    return tl.where(key <= KEY_END, chance * ONE, 0.0).to(tl.int64)


@triton.jit
def min_p_key(min_p):
    """The last key that min-p leaves."""
    below = 0.0 - tl.log(tl.where(min_p > 0.0, min_p, 1.0).to(tl.float64))
    key = tl.maximum(below.to(tl.float32).to(tl.int32, bitcast=True), 0)
    return tl.where(min_p > 0.0, tl.minimum(key, KEY_END), KEY_END)


@triton.jit
def nucleus_goal(total, top_p):
    """The least mass that makes up top_p of the total: at least 1, so that one token stays."""
    exact = total.to(tl.float64) * top_p.to(tl.float64)
    goal = exact.to(tl.int64)
    goal += (goal.to(tl.float64) < exact).to(tl.int64)
    return tl.maximum(tl.minimum(goal, total), 1)


@triton.jit
def mixed(value):
    """splitmix64's finaliser of a uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform_of(seed_low, seed_high, position):
    """float64 in [0, 1), a function of the seed and the position alone."""
    low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    stream = mixed(seed + golden)
    bits = mixed(stream + (position.to(tl.uint64) + 1) * golden)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def least(values, weights, goal, low, high, slack, PIVOTS: tl.constexpr):
    """The least v in low + 1 .. high - 1 where the weights of values up to v reach the goal, else high. values: int32.

    slack: -1, or by how much the weights up to what is returned may exceed the goal.
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
    """int64 below the total: the draw is the first token whose cumulated mass exceeds it."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def equals_kept(goal, below, mass):
    """How many tokens of equal mass a nucleus takes after those below: enough to reach the goal, one at least."""
    return tl.maximum((goal - below + mass - 1) // tl.maximum(mass, 1), 1)
