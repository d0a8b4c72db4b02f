"""Past tokens on the host of slots with penalties or DRY, to correct the device's token counts and to compute DRY's losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan, SlotParams
from services.worker.exec.sampling.admission import needs_counts
from services.worker.exec.sampling.dry import Repeats

I32 = NDArray[np.int32]
Loss = tuple[NDArray[np.int64], NDArray[np.float32]]  # a row's distinct ids, and the loss of each logit
NO_LOSS: Loss = (np.empty(0, np.int64), np.empty(0, np.float32))


class FollowedTokens:
    """The tokens of one sequence after its history, as the model has read or sampled them.

    The model's input decides: if a position is computed with a token other than the sampled one, the sampled token and all
    tokens after it are removed.
    """

    def __init__(self, first: int) -> None:
        self._first = first  # position of the first token after the history
        self._tokens: list[int] = []

    def add(self, token: int) -> None:
        """Appends the next token, which was sampled."""
        self._tokens.append(token)

    def follow(self, start: int, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Replaces the tokens from position `start` on by the model's input.

        Returns:
            The removed tokens in order, and the added tokens. Tokens that were equal are in neither list.
        """
        skipped = max(0, self._first - start)
        begin, end = max(0, start - self._first), start + len(ids) - self._first
        if end < 0:
            return [], []
        given = list(ids[skipped:])
        same = begin
        while same < min(end, len(self._tokens)) and self._tokens[same] == given[same - begin]:
            same += 1
        removed, added = self._tokens[same:], given[same - begin :]
        self._tokens[same:] = added
        assert self._tokens[begin:end] == given, "what came as input is what stands there"
        assert len(self._tokens) == max(end, 0), "nothing stands behind it"
        return removed, added


@dataclass(slots=True)
class Past:
    """The past tokens of one admission of a slot."""

    followed: FollowedTokens
    repeats: Repeats | None  # for DRY, or None without it
    counts: bool  # the device counts the slot's tokens for penalties

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
    """The losses of a batch's rows, in the form of kernels.contracts.sample_ops.SampleRows."""

    offsets: I32  # [n + 1]
    ids: I32  # [L]
    values: NDArray[np.float32]  # [L]

    @classmethod
    def of(cls, rows: Sequence[Loss]) -> Losses:
        offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)]).astype(np.int32)
        ids = np.concatenate([NO_LOSS[0], *(ids for ids, _ in rows)]).astype(np.int32)
        losses = cls(offsets, ids, np.concatenate([NO_LOSS[1], *(values for _, values in rows)]))
        assert len(losses.ids) == len(losses.values) == losses.offsets[-1], "each lost logit has its token"
        return losses


class PastTokens:
    """The past tokens of slots with penalties or DRY, from each admission until the slot's next one.

    The caller passes the tokens of all earlier steps to Past.add() before it asks for the losses of a step.
    """

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
        """Returns the index and the past of each row that has a past.

        The pasts belong to the present admissions. When the result of the step arrives, a slot may have another request.
        """
        return [(row, past) for row, slot in enumerate(slots.tolist()) if (past := self._of.get(slot))] if self._of else []

    def follows(self, plan: BatchPlan) -> bool:
        """Returns whether an extend row of the plan belongs to a slot with a past."""
        return bool(self._of) and any(slot in self._of for slot in plan.slots[: plan.num_extend].tolist())

    def follow(self, plan: BatchPlan) -> dict[tuple[int, int], int]:
        """Adds the tokens of the plan's extend rows. Returns the changes of the device's counts by (slot, token)."""
        changes: Counter[tuple[int, int]] = Counter()
        ends = np.cumsum(plan.num_tokens[: plan.num_extend]).tolist()
        for row, end in enumerate(ends):
            slot = int(plan.slots[row])
            past = self._of.get(slot)
            if past is None:
                continue
            ids = plan.input_ids[end - int(plan.num_tokens[row]) : end].clip(0, self._vocab_size - 1)
            assert len(ids) == int(plan.num_tokens[row]), "an extend row brings all of its ids"
            removed, added = past.follow(int(plan.starts[row]), ids.tolist())
            if past.counts:
                changes.update((slot, token) for token in added)
                changes.subtract((slot, token) for token in removed)
        return changes

    def losses_of(self, slot: int) -> Loss:
        """Returns the losses that DRY causes for the slot's next token."""
        past = self._of.get(slot)
        return NO_LOSS if past is None or past.repeats is None else past.repeats.penalties()

    def losses_behind(self, slot: int, guesses: Sequence[int]) -> list[Loss]:
        """Returns the losses for the token after each draft token, if all draft tokens up to it are accepted."""
        past = self._of.get(slot)
        if past is None or past.repeats is None:
            return [NO_LOSS] * len(guesses)
        ahead, losses = past.repeats.ahead(), []
        for token in guesses:
            ahead.add(token)
            losses.append(ahead.penalties())
        return losses
