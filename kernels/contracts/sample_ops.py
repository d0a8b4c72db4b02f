"""Sampling on the device, without sorting and without a host's look at a value. kernels.reference.layers satisfies it as a
module, kernels.triton and kernels.cpu as objects. n rows of logits, V tokens of vocabulary, S slots; columns are int32
unless said otherwise.

Order per row: repetition, frequency and presence penalties, further losses
(DRY), logit bias, stop tokens before min_new_tokens, sets of tokens and the grammar's mask, temperature,
top-n-sigma, top-k, top-p, min-p, draw.
No call allocates, and none but measure_logprobs depends on anything but its tensors: all can be captured in a CUDA graph.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class SlotColumn(enum.IntEnum):
    """Columns of SlotTable.params. Floats are stored by their bits."""

    SEED_LOW = 0  # the seed's lower 32 bits
    SEED_HIGH = 1
    TEMPERATURE = 2  # float; 0: greedy
    TOP_K = 3  # below 1: all
    TOP_P = 4  # float, at least 0; the likeliest token stays at any value
    MIN_P = 5  # float
    REPETITION = 6  # float; 1: none
    FREQUENCY = 7  # float
    PRESENCE = 8  # float
    EDITED_UNTIL = 9  # position of a sampled token from which on its logits are drawn from as they are
    STOPPED_UNTIL = 10  # position of a sampled token from which on stop tokens may be sampled
    NUM_BIASES = 11
    NUM_STOPS = 12
    COUNTS = 13  # 1: the slot's row of `counts` is kept and used
    WORDS = 14  # 1: the slot's row of `words` is used
    TOP_N_SIGMA = 15  # float; 0: all
    WIDTH = 16


SEEN = -(1 << 15)  # bit 15 of a count: the token stands in the prompt; the other 15 bits count it in the output
MAX_COUNT = (1 << 15) - 1
NOBODY = -1  # the slot of a row that is padding, or is not sampled
MAX_TOP = 32  # top log probabilities of one row


@dataclass(frozen=True, slots=True)
class SlotTable:
    """What each slot asks for, on the device from its admission on.

    params: [S, SlotColumn.WIDTH]. counts: int16[S, V], see SEEN. words: [S, ceil(V / 32)], bit i of word w set where token
    32 w + i may be sampled. bias_ids: [S, B] and biases: float32[S, B], the first NUM_BIASES of them, ids inside the
    vocabulary, possibly repeated. stop_ids: [S, C], the first NUM_STOPS.
    """

    params: Tensor
    counts: Tensor
    words: Tensor
    bias_ids: Tensor
    biases: Tensor
    stop_ids: Tensor


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows to sample. slots, positions: [n]; a slot below 0 is padding, for which nothing is read or written but its
    token and fault, which become 0. positions: absolute, of the tokens to sample.

    mask_rows: [n], the row of masks that further limits the tokens, below 0 for none. masks: [m, ceil(V / 32)], as words.
    loss_offsets: [n + 1]; loss_ids: [L], losses: float32[L]: row r's logits at ids loss_offsets[r] .. loss_offsets[r + 1] - 1
    of loss_ids, distinct within the row, lose that much.
    """

    slots: Tensor
    positions: Tensor
    mask_rows: Tensor
    masks: Tensor
    loss_offsets: Tensor
    loss_ids: Tensor
    losses: Tensor


@dataclass(frozen=True, slots=True)
class Measured:
    """Natural log probabilities of raw logits, float32. own: [n], of the row's token. top_ids: int32[n, K] and top: [n, K],
    falling, of equals the lowest id first; -1 and -inf where the vocabulary is smaller. mass: [n], the log of the sum of exp."""

    own: Tensor
    top_ids: Tensor
    top: Tensor
    mass: Tensor


class SampleKernels(Protocol):
    def edit_logits(self, edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
        """edited, logits: float32[n, V]. Fills edited for the rows that need it: position < EDITED_UNTIL, or a mask, or a
        loss. Other rows of it stay undefined, at next to no cost. Penalties keep what is finite finite.

        With count c, seen if c != 0, and output count o = c & MAX_COUNT: a seen token's x becomes x / REPETITION if x > 0
        else x * REPETITION; then x -= FREQUENCY * o + PRESENCE where o > 0.
        """

    def select_tokens(
        self,
        tokens: Tensor,
        faults: Tensor,
        logits: Tensor,
        edited: Tensor,
        rows: SampleRows,
        table: SlotTable,
        relay: Tensor,
    ) -> None:
        """tokens, faults: int32[n], filled. Reads each row from edited if edit_logits has filled it, else from logits.

        Greedy rows: the maximum, of equals the lowest id. Others: temperature, top-n-sigma (0 cuts nothing), top-k (below 1:
        all; of equals the lowest ids stay), top-p of what is left (1 cuts nothing), min-p relative to the likeliest (0 cuts
        nothing); then the first id, in ascending order of what is left, whose cumulated mass exceeds the uniform number times
        the whole. That number is a function of seed and position alone, kernels.reference.sampling.uniform. A fault
        (RowFault.NAN_LOGITS: the raw maximum is NaN or infinite; NO_TOKEN_ALLOWED: the edited one is) makes the token 0. Else
        relay int64[S] gets the token at the row's slot, and counts[slot, token] one more where the slot has COUNTS (it stays at
        MAX_COUNT).

        Top-n-sigma (Tang et al., "Top-nσ: Not All Logits Are You Need", 2024) keeps each x with (max - x) / TEMPERATURE <=
        TOP_N_SIGMA * sigma / TEMPERATURE: the maximum and its equals always, and at any temperature the same tokens, but for
        these quotients' rounding. sigma: the standard deviation of the row's finite logits as edited, over their whole number.
        Its sums are of float64, so that sigma, a float32, is the same wherever it is computed; all else is of float32.
        """

    def measure_logprobs(self, out: Measured, logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """logits: float32[N, V]; rows: int32[n], which of them to measure, below 0 for none; tokens: int32[n]. No copy of the
        vocabulary is made. K, of out.top_ids, is at most MAX_TOP; 0 asks for no top ones. A token outside the vocabulary:
        -inf."""
