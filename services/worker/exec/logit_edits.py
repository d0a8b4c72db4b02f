"""What changes one slot's logits before temperature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import SlotParams
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.exec.penalties import Penalties, needs_penalties
from services.worker.exec.sampling.token_sets import Words, inside, token_words

ALWAYS = np.iinfo(np.int64).max


def edited_until(slot: SlotParams) -> int:
    """The position from which on the slot's logits are drawn from as they are: 0, the end of min_new_tokens, or ALWAYS."""
    params = slot.params
    if needs_penalties(params) or params.logit_bias or params.allowed_token_ids or params.banned_token_ids:
        return int(ALWAYS)
    return slot.num_prompt_tokens + params.min_new_tokens if params.min_new_tokens and slot.stop_token_ids else 0


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """words: uint32[ceil(V / 32)] of the tokens that may be sampled, None for all. penalties: None without any."""

    num_prompt_tokens: int
    min_new_tokens: int
    stop_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    biases: NDArray[np.float32]
    words: Words | None
    penalties: Penalties | None

    @classmethod
    def of(cls, slot: SlotParams, vocab_size: int) -> LogitEdits:
        params = slot.params
        biased = [(token, bias) for token, bias in params.logit_bias if 0 <= token < vocab_size]
        return cls(
            num_prompt_tokens=slot.num_prompt_tokens,
            min_new_tokens=params.min_new_tokens,
            stop_ids=inside(slot.stop_token_ids if params.min_new_tokens else (), vocab_size),
            bias_ids=np.array([token for token, _ in biased], dtype=np.int64),
            biases=np.array([bias for _, bias in biased], dtype=np.float32),
            words=_words(params, vocab_size),
            penalties=Penalties(slot, vocab_size) if needs_penalties(params) else None,
        )

    def apply(self, logits: NDArray[np.float32], position: int) -> None:
        """Edits float32[V] in place, but for words. position: absolute, of the token about to be sampled."""
        if self.penalties is not None:
            self.penalties.apply(logits)
        if len(self.bias_ids):
            np.add.at(logits, self.bias_ids, self.biases)
        if position - self.num_prompt_tokens < self.min_new_tokens:
            logits[self.stop_ids] = -np.inf


def _words(params: SamplingParams, vocab_size: int) -> Words | None:
    if not params.allowed_token_ids and not params.banned_token_ids:
        return None
    return token_words(params.allowed_token_ids, params.banned_token_ids, vocab_size)
