"""What goes between the scheduler core and an executor: a BatchPlan out, a StepResult back. Columns, not row objects.

Both are immutable once built. Arrays are numpy, int32 unless said otherwise, and belong to the plan: the executor may
read them from its own thread until the step's result has been committed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.contracts.row_fault import RowFault as RowFault
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.core.contracts.transfers import PageOperation

I32 = NDArray[np.int32]
VERIFIED_TOKENS = 16  # of a decode step, up to which it is bound by reading weights: guesses beside few rows cost little
NO_STEP = 0  # steps are numbered from 1
_NO_TOKENS: I32 = np.empty(0, dtype=np.int32)


def no_tokens() -> I32:
    """None, for nobody to write to."""
    return _NO_TOKENS


class ForwardMode(enum.IntEnum):
    IDLE = 0
    EXTEND = 1
    DECODE = 2
    MIXED = 3


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What the executor keeps on its device for a slot from the step that admits it until the slot is admitted again.

    num_prompt_tokens: of the user's prompt, without output kept over a retraction.
    history: int32[n], prompt and kept output in order, where penalties need counts or the executor drafts for it, else empty.
    stop_token_ids: ids (EOS included, unless ignored) masked until min_new_tokens outputs exist.
    prediction: int32[n], text that the output may turn out to be, for who drafts; empty: nobody has said.
    drafted_for: whether the decode rows of the slot may have draft tokens.
    """

    slot: int
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    history: I32
    prediction: I32 = field(default_factory=no_tokens)
    drafted_for: bool = False


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step. Rows: extend rows first (num_extend of them), then decode rows.

    slots, starts, num_tokens: [rows]; row r computes positions starts[r] .. starts[r] + num_tokens[r] - 1 of its sequence.
    input_ids: tokens of the extend rows, flat, in row order. The one input token of a decode row is gathered by the
        executor from FutureMap[slot], where the step before (or an earlier one) has left it.
    sample: bool[rows]; False for a chunk that is not its request's last. The executor samples none of these rows whose request
        does not sample (SamplingParams.samples).
    mask_rows: rows, of those with sample set, whose grammar's mask must be given to the executor's sample().
    prompt_logprob_rows: extend rows that give logprobs of prompt tokens; in parallel, prompt_logprob_offsets: index into the
        row's tokens of the first that predicts a wanted one (token i of a row predicts token i + 1 of its sequence), and
        prompt_logprob_nexts: the prompt token after the row's last, -1 where that one is not part of the prompt.
    admitted: parameters of slots that begin with this step; they hold for later steps too.
    drafts: [rows], empty unless the executor drafts: how many tokens it may guess behind the input token of a decode row and
        verify with it. Such a row computes num_tokens = 1 + drafts positions, of which the first is known to the executor alone:
        what the step before it accepted is not committed yet. starts is then the last position that it can be.
    table_slots, table_firsts, table_counts: [updates]; table_pages: flat. For update u, logical pages
        firsts[u] .. firsts[u] + counts[u] - 1 of slot slots[u] become the next counts[u] ids of table_pages.
        Applied before the forward pass, in any order: no two of them name the same place. A slot's table is stale beyond what
        its rows cover.
    operations: that begin once all steps launched before have ended, beside this one. A plan that has nothing else is IDLE, is
        not launched, and has no result.
    """

    step_id: int
    mode: ForwardMode
    num_extend: int
    slots: I32
    starts: I32
    num_tokens: I32
    input_ids: I32
    sample: NDArray[np.bool_]
    mask_rows: I32
    prompt_logprob_rows: I32
    prompt_logprob_offsets: I32
    prompt_logprob_nexts: I32
    admitted: tuple[SlotParams, ...]
    table_slots: I32
    table_firsts: I32
    table_counts: I32
    table_pages: I32
    drafts: I32 = field(default_factory=no_tokens)
    operations: tuple[PageOperation, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)


def idle_plan(operations: tuple[PageOperation, ...]) -> BatchPlan:
    """Of no step."""
    none, no_rows = no_tokens(), np.empty(0, dtype=np.bool_)
    columns = (none, none, none, none, no_rows, none, none, none, none, (), none, none, none, none, none)
    return BatchPlan(NO_STEP, ForwardMode.IDLE, 0, *columns, operations)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities (natural, fp32, of the raw logits) of one sampled token: its own, the top ones in falling order, and
    those of params.logprob_token_ids in their order."""

    sampled: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]
    chosen: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The same for n consecutive prompt tokens. values: float32[n]; top_ids: int32[n, k]; top: float32[n, k], falling;
    chosen: float32[n, m]. The last row predicts prompt_logprob_nexts, and is left out where that is -1."""

    values: NDArray[np.float32]
    top_ids: I32
    top: NDArray[np.float32]
    chosen: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens: int32[rows], meaningful where plan.sample and the request samples; with counts (int32[rows], 1 at least) flat, so
    many of each row: drafted ones that were sampled too, and the first that was not drafted; drafted: int32[rows], guesses that
    each row had, no more than planned; predicted: bool[rows], whether these are of its request's prediction, None where none
    are. faults: row -> fault, of its last token. logprobs: place in tokens -> values, prompt_logprobs: row -> values, where
    asked. embeddings: row -> float32[dimensions], for rows with sample set whose request wants a vector. label_logprobs: row ->
    float32[labels], for rows with sample set whose request wants a score, see ScoreParams. seconds: that the executor worked on
    it, waiting left out; 0 where nobody has measured it."""

    step_id: int
    tokens: I32
    faults: dict[int, RowFault] = field(default_factory=dict)
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    label_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    counts: I32 | None = None
    drafted: I32 | None = None
    predicted: NDArray[np.bool_] | None = None
    seconds: float = 0.0
