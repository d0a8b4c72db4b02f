"""What one slot's past tokens do to its logits: frequency, presence and repetition penalties, and DRY."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import I32, SlotParams
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.exec.followed_tokens import FollowedTokens
from services.worker.exec.sampling.dry import Repeats
from services.worker.exec.token_counts import TokenCounts

FINITE = np.finfo(np.float32)


def needs_penalties(params: SamplingParams) -> bool:
    counted = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return bool(counted or (params.dry is not None and params.dry.multiplier))


class Penalties:
    """Counts of a slot's sequence: its history at admission, then what was sampled or came as input (FollowedTokens)."""

    def __init__(self, slot: SlotParams, vocab_size: int) -> None:
        params, history = slot.params, slot.history.astype(np.int64).clip(0, vocab_size - 1)
        self._params = params
        self._vocab_size = vocab_size
        counted = params.frequency_penalty or params.presence_penalty
        self._outputs = TokenCounts(history[slot.num_prompt_tokens :]) if counted else None
        self._seen = TokenCounts(history) if params.repetition_penalty != 1.0 else None
        self._repeats = Repeats(params.dry, history) if params.dry is not None and params.dry.multiplier else None
        self._followed = FollowedTokens(len(history))

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Edits float32[V] in place, single logits only. What is finite stays so."""
        params = self._params
        if self._seen is not None:
            old = logits[self._seen.ids].astype(np.float64)  # a tiny penalty must not overflow
            new = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
            finite = new.clip(FINITE.min, FINITE.max)
            logits[self._seen.ids] = np.where(np.isfinite(old), finite, old)
        if self._outputs is not None:
            penalty = params.frequency_penalty * self._outputs.counts + params.presence_penalty
            logits[self._outputs.ids] -= penalty.astype(np.float32)
        if self._repeats is not None:
            ids, lost = self._repeats.penalties()
            logits[ids] -= lost

    def count(self, token: int) -> None:
        """Takes note of the next token."""
        self._followed.add(token)
        self._count(token)

    def follow(self, start: int, ids: I32) -> None:
        """Takes note of an extend row, int32[n] at positions from start on: its tokens that are new or other than what was
        sampled there; what was sampled beyond it is stale."""
        removed, added = self._followed.follow(start, ids.clip(0, self._vocab_size - 1).tolist())
        for token in removed:
            for counts in (self._outputs, self._seen):
                if counts is not None:
                    counts.remove(token)
        if removed and self._repeats is not None:
            self._repeats.remove_last(len(removed))
        for token in added:
            self._count(token)

    def _count(self, token: int) -> None:
        for counts in (self._outputs, self._seen, self._repeats):
            if counts is not None:
                counts.add(token)
