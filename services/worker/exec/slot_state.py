"""Sampling parameters and past tokens of each slot, kept on the device from admission on. Owned by the sampler."""

from __future__ import annotations

import numpy as np

from services.worker.core.contracts.plan import BatchPlan, SlotParams
from services.worker.exec.logit_edits import LogitEdits, edited_until
from services.worker.exec.penalties import Penalties

UINT64 = (1 << 64) - 1


class SlotState:
    """Columns by slot, and what only few slots have by number.

    edited_until: int64[slots], see edited_until(). edits: of slots where that is not 0. penalties: those of edits, again.
    """

    def __init__(self, max_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.seeds = np.zeros(max_slots, dtype=np.uint64)
        self.temperatures = np.zeros(max_slots, dtype=np.float32)
        self.top_ks = np.full(max_slots, -1, dtype=np.int64)
        self.top_ps = np.ones(max_slots, dtype=np.float32)
        self.min_ps = np.zeros(max_slots, dtype=np.float32)
        self.edited_until = np.zeros(max_slots, dtype=np.int64)
        self.edits: dict[int, LogitEdits] = {}
        self.penalties: dict[int, Penalties] = {}

    def admit(self, slot: SlotParams) -> None:
        """Begins a slot anew; nothing of its last holder stays."""
        params, index = slot.params, slot.slot
        self.seeds[index] = params.seed & UINT64
        self.temperatures[index] = params.temperature
        self.top_ks[index], self.top_ps[index], self.min_ps[index] = params.top_k, params.top_p, params.min_p
        self.edited_until[index] = edited_until(slot)
        self.edits.pop(index, None)
        self.penalties.pop(index, None)
        if self.edited_until[index]:
            edits = self.edits[index] = LogitEdits.of(slot, self._vocab_size)
            if edits.penalties is not None:
                self.penalties[index] = edits.penalties

    def follow(self, plan: BatchPlan) -> None:
        """Lets penalties take note of the plan's extend rows: their tokens need not have been sampled here."""
        if not self.penalties:
            return
        ends = np.cumsum(plan.num_tokens[: plan.num_extend])
        for row, end in enumerate(ends.tolist()):
            if (penalties := self.penalties.get(int(plan.slots[row]))) is not None:
                penalties.follow(int(plan.starts[row]), plan.input_ids[end - int(plan.num_tokens[row]) : end])
