"""What goes between the scheduler core and an executor: a BatchPlan out, a StepResult back. Columns, not row objects.

Both are immutable once built. Arrays are numpy, int32 unless said otherwise, and belong to the plan: the executor may
read them from its own thread until the step's result has been committed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.core.sampling import SamplingParams

I32 = NDArray[np.int32]


class ForwardMode(enum.IntEnum):
    IDLE = 0
    EXTEND = 1
    DECODE = 2
    MIXED = 3


class RowFault(enum.IntEnum):
    """Something wrong with one row's result; ends that request alone."""

    NAN_LOGITS = 1
    OUT_OF_VOCAB = 2


@dataclass(frozen=True, slots=True)
class SlotParams:
    """What the executor keeps on its device for a slot from the step that admits it until the slot is admitted again.

    num_prompt_tokens: of the user's prompt, without output kept over a retraction.
    history: int32[n], prompt and kept output in order, given only where penalties need counts (else empty).
    stop_token_ids: ids (EOS included, unless ignored) masked until min_new_tokens outputs exist.
    """

    slot: int
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    history: I32


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step. Rows: extend rows first (num_extend of them), then decode rows.

    slots, starts, num_tokens: [rows]; row r computes positions starts[r] .. starts[r] + num_tokens[r] - 1 of its sequence.
    input_ids: tokens of the extend rows, flat, in row order. The one input token of a decode row is gathered by the
        executor from FutureMap[slot], where the step before (or an earlier one) has left it.
    sample: bool[rows]; False for a chunk that is not its request's last.
    admitted: parameters of slots that begin with this step; they hold for later steps too.
    table_slots, table_firsts, table_counts: [updates]; table_pages: flat. For update u, logical pages
        firsts[u] .. firsts[u] + counts[u] - 1 of slot slots[u] become the next counts[u] ids of table_pages.
        Applied in order before the forward pass. A slot's table is stale beyond what its rows cover.
    """

    step_id: int
    mode: ForwardMode
    num_extend: int
    slots: I32
    starts: I32
    num_tokens: I32
    input_ids: I32
    sample: NDArray[np.bool_]
    admitted: tuple[SlotParams, ...]
    table_slots: I32
    table_firsts: I32
    table_counts: I32
    table_pages: I32

    @property
    def num_rows(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities (natural, fp32) of one sampled token: its own, and the top ones in falling order."""

    sampled: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens: int32[rows], meaningful where plan.sample. faults: row -> fault. logprobs: row -> values, where asked."""

    step_id: int
    tokens: I32
    faults: dict[int, RowFault]
    logprobs: dict[int, RowLogprobs]
