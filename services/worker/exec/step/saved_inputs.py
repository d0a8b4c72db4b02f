"""Records where the inputs of the slots' draft tokens are saved, and finds the tokens that a step replays.

Each slot has two parts of the saved inputs, with max_drafts + 1 tokens each. A row with draft tokens saves into the part that was
not written last, because the row itself may replay from the other part, and because a grammar may undo the slot's last row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.exec.contracts.draft_states import Replays

I64 = NDArray[np.int64]
PARTS = 2
NOT_SAVED = -1


def saved_tokens(max_slots: int, max_drafts: int) -> int:
    """Returns the number of tokens whose inputs a pool can save; 0 without draft tokens."""
    return PARTS * max_slots * (max_drafts + 1) if max_drafts else 0


class SavedInputs:
    """The positions of the tokens whose inputs are saved. Belongs to the thread that launches steps."""

    def __init__(self, max_slots: int, max_drafts: int) -> None:
        self._max_slots, self._tokens = max_slots, max_drafts + 1
        self._firsts = np.full((PARTS, max_slots), NOT_SAVED, dtype=np.int64)  # position of the first token of each part
        self._newest = np.zeros(max_slots, dtype=np.int64)  # part that was written last

    def replays_of(self, plan: BatchPlan, starts: I64) -> Replays | None:
        """Returns the tokens that a step replays and saves, and records the saved ones. None if the step does neither.

        Args:
            plan: the scheduler's plan, with states.
            starts: int64[rows], first position of each row.
        """
        self._firsts[:, [admitted.slot for admitted in plan.admitted]] = NOT_SAVED
        slots, extends = plan.slots.astype(np.int64), plan.num_extend
        counts = starts - plan.state_starts
        drafted = plan.drafts > 0 if len(plan.drafts) else np.zeros(len(slots), dtype=np.bool_)
        assert counts.min(initial=0) >= 0, "a row does not begin before the state that it reads"
        replays = self._replays(plan, slots, starts, counts, drafted) if counts.any() or drafted.any() else None
        self._firsts[:, slots[:extends]] = NOT_SAVED
        return replays

    def _replays(self, plan: BatchPlan, slots: I64, starts: I64, counts: I64, drafted: NDArray[np.bool_]) -> Replays:
        newest = self._newest[slots]
        parts = np.where(self._firsts[newest, slots] == plan.state_starts, newest, 1 - newest)
        found = self._firsts[parts, slots] == plan.state_starts
        assert found[counts > 0].all() and counts.max(initial=0) <= self._tokens, "the inputs of replayed tokens are saved"
        starts_of, counts_of, sources, targets = np.zeros((4, self._max_slots), dtype=np.int64)
        targets.fill(NOT_SAVED)
        starts_of[slots], counts_of[slots] = starts, counts
        sources[slots] = self._row(parts, slots)
        mine = slots[drafted]
        self._newest[mine] = 1 - self._newest[mine]
        self._firsts[self._newest[mine], mine] = starts[drafted]
        targets[mine] = self._row(self._newest[mine], mine)
        return Replays(starts_of, counts_of, sources, targets)

    def _row(self, parts: I64, slots: I64) -> I64:
        """Returns the first row of the saved inputs of each part, int64[n]."""
        return (parts * self._max_slots + slots) * self._tokens
