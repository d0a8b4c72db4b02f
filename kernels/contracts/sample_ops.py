"""Declares the sampling kernels and the tensors that they read.

The module rootstock_llm.kernels.reference.sampling and the classes CpuSampling and TritonSampling implement the protocol.

Letters in shapes: n rows of logits, V tokens of vocabulary, S slots. Columns are int32 unless a line states another dtype.

Each row is processed in this order:

1. repetition, frequency and presence penalties
2. losses, which are values subtracted from the logits of listed tokens (DRY)
3. logit bias
4. stop tokens, forbidden before min_new_tokens
5. allowed token sets and the grammar's mask
6. temperature
7. top-n-sigma, top-k, top-p, min-p
8. the draw

The Triton kernels do not sort the vocabulary, read no device value on the host and allocate no tensor, so a
CUDA graph can capture each call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class SlotColumn(enum.IntEnum):
    """Columns of SlotTable.params. A float is stored by its bits."""

    SEED_LOW = 0  # lower 32 bits of the seed
    SEED_HIGH = 1  # upper 32 bits of the seed
    TEMPERATURE = 2  # float; 0: greedy
    TOP_K = 3  # below 1: no cut
    TOP_P = 4  # float, at least 0; even at 0, the most likely token can be sampled
    MIN_P = 5  # float; 0: no cut
    REPETITION = 6  # float; 1: no penalty
    FREQUENCY = 7  # float; 0: no penalty
    PRESENCE = 8  # float; 0: no penalty
    EDITED_UNTIL = 9  # position of the first sampled token whose logits need no edits by the slot's parameters
    STOPPED_UNTIL = 10  # position of the first sampled token that may be a stop token
    NUM_BIASES = 11  # valid entries in the slot's row of bias_ids
    NUM_STOPS = 12  # valid entries in the slot's row of stop_ids
    COUNTS = 13  # 1: the slot's row of `counts` is updated and used
    WORDS = 14  # 1: the slot's row of `words` is used
    TOP_N_SIGMA = 15  # float; 0: no cut
    WIDTH = 16  # number of the columns above


SEEN = -(1 << 15)  # bit 15 of a count: the token occurs in the prompt; the other 15 bits count it in the output
MAX_COUNT = (1 << 15) - 1  # largest count of a token in the output; a count stays at it
NO_SLOT = -1  # value of SampleRows.slots for a padding row and for a row that is not sampled
MAX_TOP = 32  # largest number of top log probabilities per row


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The sampling parameters of each slot, on the device. They are written when a request is admitted to the slot."""

    params: Tensor  # int32[S, SlotColumn.WIDTH]
    counts: Tensor  # int16[S, V]: occurrences of each token; see SEEN
    words: Tensor  # int32[S, ceil(V / 32)]: bit i of word w allows token 32 w + i
    bias_ids: Tensor  # int32[S, B]: ids of the vocabulary, possibly repeated; the first NUM_BIASES are valid
    biases: Tensor  # float32[S, B]: values that are added to the logits at bias_ids
    stop_ids: Tensor  # int32[S, C]: ids of stop tokens; the first NUM_STOPS are valid


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows to sample.

    Kernels skip a row with a slot below 0 (padding), except that select_tokens() sets its token and its fault to 0.
    """

    slots: Tensor  # int32[n]: slot of each row in SlotTable; below 0: padding
    positions: Tensor  # int32[n]: absolute positions of the tokens to sample
    mask_rows: Tensor  # int32[n]: row of `masks` with the grammar's mask; below 0: no mask
    masks: Tensor  # int32[m, ceil(V / 32)], as SlotTable.words
    loss_offsets: Tensor  # int32[n + 1]: row r has entries loss_offsets[r] .. loss_offsets[r + 1] - 1 of the next two columns
    loss_ids: Tensor  # int32[L]: token ids, distinct within a row
    losses: Tensor  # float32[L]: values that are subtracted from the logits at loss_ids


@dataclass(frozen=True, slots=True)
class Measured:
    """Natural log probabilities of raw logits, filled by measure_logprobs()."""

    own: Tensor  # float32[n]: log probability of the row's token
    top_ids: Tensor  # int32[n, K]: most likely tokens first, the lower id first among equals; -1 beyond the vocabulary
    top: Tensor  # float32[n, K]: log probabilities of top_ids; -inf beyond the vocabulary
    mass: Tensor  # float32[n]: logsumexp of the row


class SampleKernels(Protocol):
    """The kernels that turn logits into tokens."""

    def edit_logits(self, edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
        """Fills the rows of `edited` that need edits.

        A row needs edits if its position is below EDITED_UNTIL, or if it has a mask or a loss. The other rows are undefined.
        Penalties do not make a finite logit infinite. For a token's logit x, they use c, the token's value in table.counts, and
        o = c & MAX_COUNT, its number of occurrences in the output:

        - If c != 0, x becomes x / REPETITION if x > 0, else x * REPETITION (CTRL: Keskar et al., arXiv 1909.05858, section
          4.1).
        - If o > 0, FREQUENCY * o + PRESENCE is then subtracted from x.

        Args:
            edited: float32[n, V].
            logits: float32[n, V].
            rows: the rows to edit.
            table: the parameters of their slots.
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
        """Chooses a token per row. Reads a row from `edited` if edit_logits() has filled it, else from `logits`.

        A greedy row takes the token with the largest logit, and the lowest id among equal logits. A row that is not greedy is
        processed in this order:

        1. temperature
        2. top-n-sigma (0: no cut)
        3. top-k (below 1: no cut; among equal logits, the lowest ids remain)
        4. top-p of the remaining tokens (1: no cut)
        5. min-p relative to the most likely token (0: no cut)

        The draw is the first id, in ascending order, whose cumulated mass exceeds u times the total mass. The uniform number u
        is a function of the seed and the position alone: rootstock_llm.kernels.reference.sampling.uniform.

        Top-n-sigma (Tang et al., "Top-nσ: Not All Logits Are You Need", 2024) keeps each x with (max - x) / TEMPERATURE <=
        TOP_N_SIGMA * sigma / TEMPERATURE. All tokens with the maximum logit remain. Apart from the rounding of these quotients,
        the temperature has no influence on the remaining tokens. sigma is the standard deviation of the row's finite edited
        logits (sqrt of the sum of squares divided by their number). Its sums are float64, so that every implementation gets the
        same float32 sigma. All other numbers are float32.

        A row has the fault RowFault.NAN_LOGITS if its raw maximum is NaN or infinite, otherwise NO_TOKEN_ALLOWED if its edited
        maximum is NaN or infinite. The token of a row with a fault is 0. The token of any other row is also written to relay at
        the row's slot and, if the slot has COUNTS, counted in counts[slot, token] up to MAX_COUNT.

        Args:
            tokens: int32[n], filled.
            faults: int32[n], filled; 0 for no fault.
            logits: float32[n, V].
            edited: float32[n, V], the output of edit_logits().
            rows: the rows to sample.
            table: the parameters of their slots; `counts` is updated.
            relay: int64[S], the last sampled token of each slot, updated.
        """

    def measure_logprobs(self, out: Measured, logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Measures log probabilities of raw logits.

        Args:
            out: filled. Its K is at most MAX_TOP; 0 for no top log probabilities.
            logits: float32[N, V].
            tokens: int32[n]; the log probability of a token outside the vocabulary is -inf.
            rows: int32[n], rows of logits to measure. The output of an entry below 0 is undefined.
        """
