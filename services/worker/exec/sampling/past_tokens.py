"""What the host keeps of slots whose past changes their logits: to correct the device's counts, and for DRY."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan, SlotParams
from services.worker.exec.followed_tokens import FollowedTokens
from services.worker.exec.sampling.admission import needs_counts
from services.worker.exec.sampling.dry import Repeats

I32 = NDArray[np.int32]


@dataclass(slots=True)
class Past:
    """One admission's."""

    followed: FollowedTokens
    repeats: Repeats | None
    counts: bool

    def add(self, token: int) -> None:
        self.followed.add(token)
        if self.repeats is not None:
            self.repeats.add(token)

    def follow(self, start: int, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        removed, added = self.followed.follow(start, ids)
        if self.repeats is not None:
            if removed:
                self.repeats.remove_last(len(removed))
            for token in added:
                self.repeats.add(token)
        return removed, added


@dataclass(frozen=True, slots=True)
class Losses:
    """offsets: int32[n + 1], ids: int32[L], values: float32[L], as kernels.contracts.sample_ops.SampleRows has them."""

    offsets: I32
    ids: I32
    values: NDArray[np.float32]


class PastTokens:
    """Of slots with penalties or DRY, from each one's admission until the next. Knows what Past.add has told it: the caller
    sees to it that these are the tokens of all steps before the one it asks about."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._of: dict[int, Past] = {}

    def __len__(self) -> int:
        return len(self._of)

    def admit(self, slot: SlotParams) -> None:
        self._of.pop(slot.slot, None)
        dry = slot.params.dry if slot.params.dry is not None and slot.params.dry.multiplier else None
        if dry is None and not needs_counts(slot):
            return
        history = slot.history.astype(np.int64).clip(0, self._vocab_size - 1)
        repeats = Repeats(dry, history) if dry is not None else None
        self._of[slot.slot] = Past(FollowedTokens(len(history)), repeats, needs_counts(slot))

    def of_rows(self, slots: I32) -> list[tuple[int, Past]]:
        """Index and past of the rows that have one, as their slots are admitted at this time: when the step's result comes,
        a slot may have another holder."""
        return [(row, past) for row, slot in enumerate(slots.tolist()) if (past := self._of.get(slot))] if self._of else []

    def follows(self, plan: BatchPlan) -> bool:
        """Whether an extend row of the plan belongs to one of the slots."""
        return bool(self._of) and any(slot in self._of for slot in plan.slots[: plan.num_extend].tolist())

    def follow(self, plan: BatchPlan) -> dict[tuple[int, int], int]:
        """Takes note of the plan's extend rows. Returns what the device's counts must change by, by (slot, token)."""
        changes: Counter[tuple[int, int]] = Counter()
        ends = np.cumsum(plan.num_tokens[: plan.num_extend]).tolist()
        for row, end in enumerate(ends):
            slot = int(plan.slots[row])
            past = self._of.get(slot)
            if past is None:
                continue
            ids = plan.input_ids[end - int(plan.num_tokens[row]) : end].clip(0, self._vocab_size - 1)
            removed, added = past.follow(int(plan.starts[row]), ids.tolist())
            if past.counts:
                changes.update((slot, token) for token in added)
                changes.subtract((slot, token) for token in removed)
        return changes

    def has_losses(self, slots: I32) -> bool:
        return any(past.repeats is not None for _, past in self.of_rows(slots))

    def losses(self, slots: I32) -> Losses:
        """What DRY takes from each row's logits; slots: [n], below 0 for none."""
        found = [self._losses_of(slot) for slot in slots.tolist()]
        offsets = np.cumsum([0, *(len(ids) for ids, _ in found)]).astype(np.int32)
        ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in found)]).astype(np.int32)
        return Losses(offsets, ids, np.concatenate([np.empty(0, np.float32), *(values for _, values in found)]))

    def _losses_of(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        past = self._of.get(slot)
        if past is None or past.repeats is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return past.repeats.penalties()
