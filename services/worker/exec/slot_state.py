"""Sampling parameters and token counts of each slot, kept on the device from admission on. Owned by the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.core.plan import SlotParams
from services.worker.core.sampling import SamplingParams
from services.worker.exec.token_counts import TokenCounts

UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes one slot's logits before temperature. Touches single logits, never the whole row.

    outputs: output tokens, None unless frequency or presence penalties need them; seen: tokens of prompt and output, None
    unless the repetition penalty needs them.
    """

    num_prompt_tokens: int
    params: SamplingParams
    stop_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    biases: NDArray[np.float32]
    outputs: TokenCounts | None
    seen: TokenCounts | None

    @classmethod
    def of(cls, slot: SlotParams, vocab_size: int) -> LogitEdits:
        params, history = slot.params, slot.history.astype(np.int64).clip(0, vocab_size - 1)
        inside = [(token, bias) for token, bias in params.logit_bias if 0 <= token < vocab_size]
        stops = [token for token in slot.stop_token_ids if 0 <= token < vocab_size] if params.min_new_tokens else []
        penalised = params.frequency_penalty or params.presence_penalty
        return cls(
            num_prompt_tokens=slot.num_prompt_tokens,
            params=params,
            stop_ids=np.array(stops, dtype=np.int64),
            bias_ids=np.array([token for token, _ in inside], dtype=np.int64),
            biases=np.array([bias for _, bias in inside], dtype=np.float32),
            outputs=TokenCounts(history[slot.num_prompt_tokens :]) if penalised else None,
            seen=TokenCounts(history) if params.repetition_penalty != 1.0 else None,
        )

    def apply(self, logits: NDArray[np.float32], position: int) -> None:
        """Edits float32[V] in place. position: absolute, of the token about to be sampled."""
        params = self.params
        if self.seen is not None:
            old = logits[self.seen.ids]
            logits[self.seen.ids] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        if self.outputs is not None:
            penalty = params.frequency_penalty * self.outputs.counts + params.presence_penalty
            logits[self.outputs.ids] -= penalty.astype(np.float32)
        np.add.at(logits, self.bias_ids, self.biases)
        if position - self.num_prompt_tokens < params.min_new_tokens:
            logits[self.stop_ids] = -np.inf

    def count(self, token: int) -> None:
        """Takes note of a sampled token."""
        for counts in (self.outputs, self.seen):
            if counts is not None:
                counts.add(token)


def _edits(params: SamplingParams) -> bool:
    penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return bool(penalised or params.logit_bias or params.min_new_tokens)


class SlotState:
    """Columns by slot, and edits of those few slots that have any. plain: temperature 0 and no edits."""

    def __init__(self, max_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.plain = np.ones(max_slots, dtype=np.bool_)
        self.seeds = np.zeros(max_slots, dtype=np.uint64)
        self.top_logprobs = np.full(max_slots, -1, dtype=np.int32)
        self.temperatures = np.zeros(max_slots, dtype=np.float32)
        self.top_ks = np.full(max_slots, -1, dtype=np.int64)
        self.top_ps = np.ones(max_slots, dtype=np.float32)
        self.min_ps = np.zeros(max_slots, dtype=np.float32)
        self.edits: dict[int, LogitEdits] = {}

    def admit(self, slot: SlotParams) -> None:
        """Begins a slot anew; nothing of its last holder stays."""
        params, index = slot.params, slot.slot
        edited = _edits(params)
        self.plain[index] = params.temperature <= 0 and not edited
        self.seeds[index] = params.seed & UINT64
        self.top_logprobs[index] = params.top_logprobs
        self.temperatures[index] = params.temperature
        self.top_ks[index], self.top_ps[index], self.min_ps[index] = params.top_k, params.top_p, params.min_p
        self.edits.pop(index, None)
        if edited:
            self.edits[index] = LogitEdits.of(slot, self._vocab_size)
