"""Columns for the recurrent layers of a pass with draft tokens, or with accepted draft tokens of earlier passes.

A recurrent layer cannot go back to an earlier state. A row with draft tokens therefore stores no state after its own tokens, and
the layer saves the inputs of the row's tokens. The slot's next row replays the accepted tokens from these inputs:

    RecurrentColumns.replays ── launch 1: rows with draft tokens replay, and store the state before their own tokens
    RecurrentColumns.rows ── launch 2: own tokens of all rows; a row without draft tokens first replays in this launch

A slot with k draft tokens has k + 1 rows of attention (step/drafted_steps.py), and one row of the recurrent layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import DraftStates, StateRows
from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan

I64 = NDArray[np.int64]
NO_STATE = -1
CONTINUED = -3  # state_before of a row whose tokens belong to the same recurrent row as those of the row before it
_NONE: I32 = np.empty(0, dtype=np.int32)
COLUMNS = 6  # offsets, num_tokens, before, after, cuts, at_cut


@dataclass(frozen=True, slots=True)
class Replays:
    """The tokens that the slots of a step replay, and where the inputs of their draft tokens are saved. int64[slots] each."""

    starts: I64  # first position of the slot's row
    counts: I64  # number of tokens that the row replays
    sources: I64  # row of the saved inputs with the first replayed token
    targets: I64  # row of the saved inputs for the row's first token; -1: the row has no draft tokens


@dataclass(frozen=True, slots=True)
class RecurrentColumns:
    """The columns of the recurrent layers of a pass: R rows, of which Q have draft tokens and replay in the first launch."""

    rows: I32  # [COLUMNS, R], the second launch
    replays: I32  # [COLUMNS, Q], the first launch
    sources: I32  # rows of the saved inputs that are read, first those of the first launch
    num_inserted: int  # number of the last elements of `sources`, which are tokens of the second launch
    # Index of each token of the second launch in the inserted tokens followed by the tokens of the pass. Empty if no token is
    # inserted.
    order: I32
    own: I32  # [T], index in the second launch of each token of the pass; empty if none is inserted
    saved: I32  # [S], tokens of the pass whose inputs are saved
    targets: I32  # [S], rows of the saved inputs in which the inputs of these tokens are saved

    @classmethod
    def of(cls, plan: BatchPlan, replays: Replays) -> RecurrentColumns:
        """Returns the columns of a plan whose rows of draft tokens follow each other and have state_before CONTINUED."""
        firsts = np.flatnonzero(plan.state_before != CONTINUED)
        counts = np.add.reduceat(plan.num_tokens, firsts).astype(np.int64)
        slots, before, after, cuts, at_cut = (
            column[firsts].astype(np.int64)
            for column in (plan.slots, plan.state_before, plan.state_after, plan.state_cuts, plan.state_at_cut)
        )
        begins = plan.starts[firsts] == replays.starts[slots]  # False for a later part of a row that is computed in pieces
        replayed = np.where(begins, replays.counts[slots], 0)
        drafted = replays.targets[slots] >= 0
        inserted = np.where(drafted, 0, replayed)
        reached = (cuts > 0) & (cuts <= replayed)
        extends = firsts < plan.num_extend
        own_cuts = np.where(extends, np.where(cuts > 0, cuts + inserted, 0), np.where(reached & ~drafted, cuts, 0))
        rows = _columns(
            counts + inserted,
            np.where(drafted, after, before),
            np.where(drafted, NO_STATE, after),
            own_cuts,
            np.where(own_cuts > 0, at_cut, NO_STATE),
        )
        only = np.flatnonzero(drafted)
        first_cuts = np.where(reached, cuts, 0)[only]
        first = _columns(replayed[only], before[only], after[only], first_cuts, np.where(first_cuts > 0, at_cut[only], NO_STATE))
        offsets = np.cumsum(counts) - counts
        order, own = _inserted(counts, inserted) if inserted.any() else (_NONE, _NONE)
        sources = [_runs(replays.sources[slots[only]], replayed[only]), _runs(replays.sources[slots], inserted)]
        saved, targets = _runs(offsets[only], counts[only]), _runs(replays.targets[slots[only]], counts[only])
        return cls(rows, first, np.concatenate(sources), int(inserted.sum()), order, own, saved, targets)

    def words(self) -> I32:
        """Returns all columns as one int32 array, which is uploaded to the device."""
        parts = (self.rows, self.replays, self.sources, self.order, self.own, self.saved, self.targets)
        return np.concatenate([part.ravel() for part in parts])

    def on_device(self, words: Tensor) -> tuple[StateRows, DraftStates]:
        """Returns the states of the second launch, and all other columns, on the device. `words` are the uploaded words()."""
        sizes = [part.size for part in (self.rows, self.replays, self.sources, self.order, self.own, self.saved, self.targets)]
        rows, replays, sources, order, own, saved, targets = torch.split(words, sizes)
        offsets, counts, *states = rows.view(COLUMNS, -1).unbind(0)
        first_offsets, first_counts, *first = replays.view(COLUMNS, -1).unbind(0)
        drafts = DraftStates(
            offsets=offsets,
            num_tokens=counts,
            replays=StateRows(*first),
            replay_offsets=first_offsets,
            replay_num_tokens=first_counts,
            sources=sources.long(),
            num_inserted=self.num_inserted,
            order=order.long(),
            own=own.long(),
            saved=saved.long(),
            targets=targets.long(),
        )
        return StateRows(*states), drafts


def _columns(counts: I64, before: I64, after: I64, cuts: I64, at_cut: I64) -> I32:
    """Returns int32[COLUMNS, n]: the offsets of n rows whose tokens follow each other, then the given columns."""
    return np.stack((np.cumsum(counts) - counts, counts, before, after, cuts, at_cut)).astype(np.int32)


def _runs(firsts: I64, counts: I64) -> I32:
    """Returns the numbers firsts[i], firsts[i] + 1, ..., counts[i] numbers for each i."""
    ends = np.cumsum(counts)
    numbers: I32 = (np.repeat(firsts - (ends - counts), counts) + np.arange(int(counts.sum()))).astype(np.int32)
    return numbers


def _inserted(counts: I64, inserted: I64) -> tuple[I32, I32]:
    """Returns RecurrentColumns.order and RecurrentColumns.own.

    Args:
        counts: int64[R], number of own tokens of each row.
        inserted: int64[R], number of tokens that are inserted before them.
    """
    total = int(inserted.sum())
    begins = np.cumsum(counts + inserted) - (counts + inserted)
    order = np.empty(total + int(counts.sum()), dtype=np.int32)
    own = _runs(begins + inserted, counts)
    order[_runs(begins, inserted)] = np.arange(total)
    order[own] = total + np.arange(len(own))
    return order, own
