"""The messages between the scheduler core and an executor: BatchPlan and StepResult. Columns, not row objects.

Both are immutable once built. Arrays are numpy int32 unless a comment says otherwise, and belong to the plan. The executor may
read them from its own thread until the step's result is committed.
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
VERIFIED_TOKENS = 16  # tokens of a decode step up to which reading the weights bounds it, so that draft tokens cost little
NO_STEP = 0  # steps are numbered from 1
_NO_TOKENS: I32 = np.empty(0, dtype=np.int32)


def no_tokens() -> I32:
    """Returns a shared empty array, which must not be written to."""
    return _NO_TOKENS


class ForwardMode(enum.IntEnum):
    IDLE = 0
    EXTEND = 1
    DECODE = 2
    MIXED = 3


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What the executor keeps on its device for a slot, from the step that admits it until the slot is admitted again."""

    slot: int
    num_prompt_tokens: int  # of the user's prompt, without output that was kept over a retraction
    params: SamplingParams
    stop_token_ids: tuple[int, ...]  # masked until min_new_tokens outputs exist; EOS included unless it is ignored
    history: I32  # int32[n], prompt and kept output; empty unless penalties need counts or the slot is drafted for
    prediction: I32 = field(default_factory=no_tokens)  # int32[n], probable output, for the drafter
    drafted_for: bool = False  # whether the decode rows of the slot may have draft tokens


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step. The first num_extend rows are extend rows, the others decode rows.

    Row r computes the positions starts[r] to starts[r] + num_tokens[r] - 1 of its sequence. Update u of the page tables sets
    the logical pages table_firsts[u] to table_firsts[u] + table_counts[u] - 1 of the slot table_slots[u] to the next
    table_counts[u] ids of table_pages. The updates are applied before the forward pass, in any order, because no two have the
    same entry. A slot's table is stale beyond the pages that its rows cover.
    """

    step_id: int
    mode: ForwardMode
    num_extend: int
    slots: I32  # [rows]
    # [rows]; for a row with draft tokens the last position that it can start at, because the step before it is not committed.
    starts: I32
    num_tokens: I32  # [rows]
    # Tokens of the extend rows, flat, in row order. A decode row takes its one input token from FutureMap[slot].
    input_ids: I32
    # bool[rows]; False for a chunk that is not its request's last. Rows whose request does not sample are not sampled either.
    sample: NDArray[np.bool_]
    mask_rows: I32  # rows with sample set that need a grammar mask in the executor's sample()
    prompt_logprob_rows: I32  # extend rows that give logprobs of prompt tokens
    prompt_logprob_offsets: I32  # in parallel: index in the row of the first token that predicts a wanted one
    prompt_logprob_nexts: I32  # in parallel: the prompt token after the row's last one; -1 if the prompt ends there
    admitted: tuple[SlotParams, ...]  # parameters of slots that begin with this step; they hold for later steps too
    table_slots: I32  # [updates]
    table_firsts: I32  # [updates]
    table_counts: I32  # [updates]
    table_pages: I32  # flat
    # [rows], empty unless the executor drafts: draft tokens of a decode row, which then computes 1 + drafts positions. The
    # executor alone knows the first one.
    drafts: I32 = field(default_factory=no_tokens)
    # Operations that begin once all steps launched before have ended. A plan of operations alone is IDLE: it is not launched
    # and has no result.
    operations: tuple[PageOperation, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)


def idle_plan(operations: tuple[PageOperation, ...]) -> BatchPlan:
    """Returns a plan with operations and without rows."""
    none, no_rows = no_tokens(), np.empty(0, dtype=np.bool_)
    columns = (none, none, none, none, no_rows, none, none, none, none, (), none, none, none, none, none)
    return BatchPlan(NO_STEP, ForwardMode.IDLE, 0, *columns, operations)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of one output token: natural, fp32, of the raw logits."""

    sampled: float  # of the sampled token
    top_ids: tuple[int, ...]
    top: tuple[float, ...]  # of top_ids, falling
    chosen: tuple[float, ...] = ()  # of params.logprob_token_ids, in their order


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of n consecutive prompt tokens. The token prompt_logprob_nexts has no entry if it is -1."""

    values: NDArray[np.float32]  # [n]
    top_ids: I32  # [n, k]
    top: NDArray[np.float32]  # [n, k], falling
    chosen: NDArray[np.float32]  # [n, m]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed. Dictionaries have the row as key, and entries for the rows that want the value."""

    step_id: int
    # [rows], meaningful where plan.sample is set and the request samples. With `counts` it is flat: counts[r] tokens of row r,
    # which are the accepted draft tokens and the first sampled token that was not drafted.
    tokens: I32
    faults: dict[int, RowFault] = field(default_factory=dict)  # of the row's last token
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)  # by index in tokens
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # float32[dimensions]
    label_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # float32[labels], see ScoreParams
    counts: I32 | None = None  # [rows], 1 or more
    drafted: I32 | None = None  # [rows], draft tokens of each row, at most the planned number
    predicted: NDArray[np.bool_] | None = None  # bool[rows], draft tokens came from the prediction; None if none did
    seconds: float = 0.0  # that the executor worked on the step, waiting excluded; 0 if it was not measured
