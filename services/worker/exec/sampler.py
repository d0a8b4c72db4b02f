"""Sampling of a mixed batch on the device. Rows that are greedy and unedited cost one argmax; the rest are done row by row.

Order per row: repetition, frequency and presence penalties, logit bias, stop tokens before min_new_tokens, the allowed-token
mask, temperature, top-k, top-p, min-p, draw. Called by the forward thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Kernels
from services.worker.core.plan import I32, RowFault, RowLogprobs, SlotParams
from services.worker.exec.draw import draw, support, uniforms
from services.worker.exec.slot_state import SlotState


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64[n]; 0 where a fault stands. faults, logprobs: by index into the n rows."""

    tokens: Tensor
    faults: dict[int, RowFault]
    logprobs: dict[int, RowLogprobs]


def _forbid(logits: Tensor, allowed: Tensor) -> None:
    """allowed: int32[ceil(V / 32)], bit i of word w set where token 32 w + i may be sampled."""
    bits = (allowed[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    logits.masked_fill_(bits.flatten()[: len(logits)] == 0, -torch.inf)


class Sampler:
    def __init__(self, max_slots: int, vocab_size: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._slots = SlotState(max_slots, vocab_size)

    def admit(self, slot: SlotParams) -> None:
        self._slots.admit(slot)

    def sample(self, logits: Tensor, slots: I32, positions: I32, allowed: Mapping[int, Tensor] | None = None) -> Sampled:
        """logits: float32[n, V], left as they are. positions: of the tokens to be sampled. allowed: row -> bitmask, see _forbid."""
        allowed = allowed or {}
        tokens = self._kernels.argmax(logits)
        peaks = logits.gather(1, tokens[:, None]).squeeze(1)
        faulty = (~peaks.isfinite()).nonzero().squeeze(1).tolist()
        faults = {row: RowFault.NAN_LOGITS for row in faulty}
        special = [row for row in np.flatnonzero(~self._slots.plain[slots]).tolist() if row not in faults]
        special += [row for row in allowed if self._slots.plain[slots[row]] and row not in faults]
        if special:
            draws = uniforms(self._slots.seeds[slots], positions)
            for row in special:
                slot = int(slots[row])
                token = self._special(logits[row].clone(), slot, int(positions[row]), float(draws[row]), allowed.get(row))
                if token is None:
                    faults[row] = RowFault.NAN_LOGITS
                else:
                    tokens[row] = token
        for row in faults:
            tokens[row] = 0
        wanted = np.flatnonzero(self._slots.top_logprobs[slots] >= 0).tolist()
        logprobs = {row: self._logprobs(logits[row], int(tokens[row]), slots[row]) for row in wanted if row not in faults}
        return Sampled(tokens, faults, logprobs)

    def _special(self, logits: Tensor, slot: int, position: int, uniform: float, allowed: Tensor | None) -> int | None:
        """The token of one row whose logits may be overwritten; None if nothing can be sampled."""
        params, edits = self._slots.params.get(slot), self._slots.edits.get(slot)
        if edits is not None:
            edits.apply(logits, position)
        if allowed is not None:
            _forbid(logits, allowed)
        peak = logits.max()
        if not bool(peak.isfinite()):
            return None
        if params is None or params.temperature <= 0:
            token = int(logits.argmax())
        else:
            logits.sub_(peak).div_(params.temperature)  # the peak first: a tiny temperature must not overflow
            token = draw(logits, support(logits, params.top_k, params.top_p, params.min_p), uniform)
        if edits is not None:
            edits.count(token)
        return token

    def _logprobs(self, logits: Tensor, token: int, slot: int) -> RowLogprobs:
        """Of the raw logits, before penalties and temperature."""
        values = logits.log_softmax(-1)
        top = values.topk(min(int(self._slots.top_logprobs[slot]), len(values)))
        return RowLogprobs(float(values[token]), tuple(top.indices.tolist()), tuple(top.values.tolist()))
