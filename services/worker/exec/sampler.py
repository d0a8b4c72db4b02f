"""Sampling of a mixed batch on the device. Rows that are greedy and unedited cost one argmax, those that draw
unedited one more pass; the rest are copied and edited row by row.

Order per row: repetition, frequency and presence penalties, logit bias, stop tokens before min_new_tokens, the allowed-token
mask, temperature, top-k, top-p, min-p, draw. Called by the forward thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Draws, Kernels
from services.worker.core.plan import I32, RowFault, RowLogprobs, SlotParams
from services.worker.exec.slot_state import SlotState
from services.worker.exec.uniform import uniforms


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


def _not_finite(logits: Tensor, places: Tensor) -> list[int]:
    """Rows whose maximum, at places, is NaN or infinite."""
    peaks = logits.gather(1, places[:, None]).squeeze(1)
    rows: list[int] = (~peaks.isfinite()).nonzero().squeeze(1).tolist()
    return rows


class Sampler:
    def __init__(self, max_slots: int, vocab_size: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._slots = SlotState(max_slots, vocab_size)

    def admit(self, slot: SlotParams) -> None:
        self._slots.admit(slot)

    def sample(self, logits: Tensor, slots: I32, positions: I32, allowed: Mapping[int, Tensor] | None = None) -> Sampled:
        """logits: float32[n, V], left as they are. positions: of the tokens sampled. allowed: row -> bitmask, see _forbid."""
        allowed = allowed or {}
        tokens = self._kernels.argmax(logits)
        faults = dict.fromkeys(_not_finite(logits, tokens), RowFault.NAN_LOGITS)
        good = [row for row in range(len(slots)) if row not in faults]
        edited = [row for row in good if row in allowed or int(slots[row]) in self._slots.edits]
        drawn = [row for row in good if self._slots.temperatures[slots[row]] > 0 and row not in edited]
        if drawn:
            tokens[drawn] = self._draw(logits, drawn, slots[drawn], positions[drawn])
        if edited:
            faults.update(self._sample_edited(logits, tokens, edited, slots, positions, allowed))
        tokens[list(faults)] = 0
        wanted = np.flatnonzero(self._slots.top_logprobs[slots] >= 0).tolist()
        logprobs = {row: self._logprobs(logits[row], int(tokens[row]), slots[row]) for row in wanted if row not in faults}
        return Sampled(tokens, faults, logprobs)

    def _draw(self, logits: Tensor, rows: list[int], slots: I32, positions: I32) -> Tensor:
        """int64[n]: draws from the given rows of logits, each with the parameters of its slot."""
        state = self._slots
        draws = Draws(
            rows=torch.tensor(rows, dtype=torch.int64),
            temperatures=torch.from_numpy(state.temperatures[slots]),
            top_ks=torch.from_numpy(state.top_ks[slots]),
            top_ps=torch.from_numpy(state.top_ps[slots]),
            min_ps=torch.from_numpy(state.min_ps[slots]),
            uniforms=torch.from_numpy(uniforms(state.seeds[slots], positions)),
        )
        return self._kernels.draw(logits, draws)

    def _sample_edited(
        self, logits: Tensor, tokens: Tensor, rows: list[int], slots: I32, positions: I32, allowed: Mapping[int, Tensor]
    ) -> dict[int, RowFault]:
        """Samples the rows into tokens from an edited copy, and counts what came out. Returns the rows that had nothing left."""
        copy = logits[rows]
        for index, row in enumerate(rows):
            if (edits := self._slots.edits.get(int(slots[row]))) is not None:
                edits.apply(copy[index].numpy(), int(positions[row]))
            if row in allowed:
                _forbid(copy[index], allowed[row])
        best = self._kernels.argmax(copy)
        lost = _not_finite(copy, best)
        tokens[rows] = best
        drawn = [i for i, row in enumerate(rows) if self._slots.temperatures[slots[row]] > 0 and i not in lost]
        if drawn:
            places = [rows[index] for index in drawn]
            tokens[places] = self._draw(copy, drawn, slots[places], positions[places])
        for index, row in enumerate(rows):
            if index not in lost and (edits := self._slots.edits.get(int(slots[row]))) is not None:
                edits.count(int(tokens[row]))
        return {rows[index]: RowFault.NAN_LOGITS for index in lost}

    def _logprobs(self, logits: Tensor, token: int, slot: int) -> RowLogprobs:
        """Of the raw logits, before penalties and temperature."""
        values = logits.log_softmax(-1)
        top = values.topk(min(int(self._slots.top_logprobs[slot]), len(values)))
        return RowLogprobs(float(values[token]), tuple(top.indices.tolist()), tuple(top.values.tolist()))
