"""Sampling parameters and token counts of each slot, kept on the device from admission on. Owned by the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.core.plan import SlotParams
from services.worker.core.sampling import SamplingParams

UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes one slot's logits before temperature. outputs: int32[V] counts of output tokens, None unless
    penalties need them; seen: bool[V], tokens of prompt or output, None unless the repetition penalty needs them."""

    num_prompt_tokens: int
    params: SamplingParams
    stop_ids: Tensor
    bias_ids: Tensor
    biases: Tensor
    outputs: Tensor | None
    seen: Tensor | None

    @classmethod
    def of(cls, slot: SlotParams, vocab_size: int) -> LogitEdits:
        params = slot.params
        outputs = seen = None
        history = torch.from_numpy(slot.history.astype(np.int64)).clamp(0, vocab_size - 1)
        if params.frequency_penalty or params.presence_penalty:
            outputs = torch.bincount(history[slot.num_prompt_tokens :], minlength=vocab_size).int()
        if params.repetition_penalty != 1.0:
            seen = torch.zeros(vocab_size, dtype=torch.bool)
            seen[history] = True
        inside = [(token, bias) for token, bias in params.logit_bias if 0 <= token < vocab_size]
        stops = [token for token in slot.stop_token_ids if 0 <= token < vocab_size] if params.min_new_tokens else []
        return cls(
            num_prompt_tokens=slot.num_prompt_tokens,
            params=params,
            stop_ids=torch.tensor(stops, dtype=torch.int64),
            bias_ids=torch.tensor([token for token, _ in inside], dtype=torch.int64),
            biases=torch.tensor([bias for _, bias in inside], dtype=torch.float32),
            outputs=outputs,
            seen=seen,
        )

    def apply(self, logits: Tensor, position: int) -> None:
        """Edits float32[V] in place. position: absolute, of the token about to be sampled."""
        params = self.params
        if self.seen is not None:
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            torch.where(self.seen, scaled, logits, out=logits)
        if self.outputs is not None:
            logits -= params.frequency_penalty * self.outputs + params.presence_penalty * (self.outputs > 0)
        if len(self.bias_ids):
            logits.index_add_(0, self.bias_ids, self.biases)
        if len(self.stop_ids) and position - self.num_prompt_tokens < params.min_new_tokens:
            logits[self.stop_ids] = -torch.inf

    def count(self, token: int) -> None:
        """Takes note of a sampled token."""
        if self.outputs is not None:
            self.outputs[token] += 1
        if self.seen is not None:
            self.seen[token] = True


def _edits(params: SamplingParams) -> bool:
    penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return bool(penalised or params.logit_bias or params.min_new_tokens)


class SlotState:
    """Columns by slot: greedy (temperature 0), plain (greedy, unedited), top_logprobs; and what few slots have by slot."""

    def __init__(self, max_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.plain = np.ones(max_slots, dtype=np.bool_)
        self.seeds = np.zeros(max_slots, dtype=np.uint64)
        self.top_logprobs = np.full(max_slots, -1, dtype=np.int32)
        self.params: dict[int, SamplingParams] = {}
        self.edits: dict[int, LogitEdits] = {}

    def admit(self, slot: SlotParams) -> None:
        """Begins a slot anew; nothing of its last holder stays."""
        params, index = slot.params, slot.slot
        edited = _edits(params)
        self.plain[index] = params.temperature <= 0 and not edited
        self.seeds[index] = params.seed & UINT64
        self.top_logprobs[index] = params.top_logprobs
        self.params[index] = params
        self.edits.pop(index, None)
        if edited:
            self.edits[index] = LogitEdits.of(slot, self._vocab_size)
