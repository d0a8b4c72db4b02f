"""Sampling of a mixed batch on the device, in one pass. Rows that are greedy and unedited cost one argmax, those that draw
unedited one more pass; the rest are copied and edited.

Order per row: repetition, frequency and presence penalties, DRY, logit bias, stop tokens before min_new_tokens, allowed and
banned tokens with the grammar's mask, temperature, top-k, top-p, min-p, draw. Called by the forward thread alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.ops import Draws, Kernels
from services.worker.core.contracts.plan import I32, BatchPlan, RowFault, RowLogprobs, SlotParams
from services.worker.exec.logprobs import Logits, Logprobs, PromptScores
from services.worker.exec.sampling.token_sets import Words, forbid_others
from services.worker.exec.slot_state import SlotState
from services.worker.exec.uniform import uniforms

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64[n]; 0 where a fault stands. faults, logprobs: by index into the n rows."""

    tokens: Tensor
    faults: dict[int, RowFault]
    logprobs: dict[int, RowLogprobs]


def _not_finite(logits: Tensor, places: Tensor) -> I64:
    """int64[<= n]: rows whose maximum, at places, is NaN or infinite."""
    peaks = logits.gather(1, places[:, None]).squeeze(1)
    return np.flatnonzero(~peaks.isfinite().numpy())


class Sampler:
    def __init__(self, max_slots: int, vocab_size: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._slots = SlotState(max_slots, vocab_size)
        self._logprobs = Logprobs(max_slots, vocab_size)
        self._edited = torch.empty((0, vocab_size))  # kept from step to step: fresh memory costs page faults

        self._broken: set[int] = set()  # slots whose parameters could not be applied, until their next admission

    def admit(self, slot: SlotParams) -> None:
        self._broken.discard(slot.slot)
        self._logprobs.admit(slot)
        with self._contained(slot.slot):
            self._slots.admit(slot)

    def follow(self, plan: BatchPlan) -> None:
        """To be called for each plan after its admissions and before its sampling: its input counts for penalties."""
        self._slots.follow(plan)

    def prompt_logprobs(self, plan: BatchPlan, logits: Logits) -> PromptScores:
        """See Logprobs.of_prompts."""
        return self._logprobs.of_prompts(plan, logits)

    def sample(self, logits: Tensor, slots: I32, positions: I32, masks: Mapping[int, Words] | None = None) -> Sampled:
        """logits: float32[n, V], left as they are. positions: of the tokens sampled. masks: row -> uint32[ceil(V / 32)]."""
        masks = masks or {}
        state = self._slots
        tokens = self._kernels.argmax(logits)
        bad = _not_finite(logits, tokens)
        faults = dict.fromkeys(bad.tolist(), RowFault.NAN_LOGITS)
        edited = positions < state.edited_until[slots]
        edited[list(masks)] = True
        drawn = (state.temperatures[slots] > 0) & ~edited
        edited[bad] = drawn[bad] = False
        if drawn.any():
            rows = np.flatnonzero(drawn)
            tokens[torch.from_numpy(rows)] = self._draw(logits, rows, slots[rows], positions[rows])
        if edited.any():
            lost = self._sample_edited(logits, tokens, np.flatnonzero(edited), slots, positions, masks)
            faults.update(dict.fromkeys(lost, RowFault.NO_TOKEN_ALLOWED))
        if self._broken:
            rows_of_broken = np.flatnonzero(np.isin(slots, list(self._broken))).tolist()
            faults.update(dict.fromkeys(rows_of_broken, RowFault.FAILED))
        if faults:
            tokens[list(faults)] = 0
        return Sampled(tokens, faults, self._logprobs.of_outputs(logits, slots, tokens, faults))

    def _draw(self, logits: Tensor, rows: I64, slots: I32, positions: I32) -> Tensor:
        """int64[n]: draws from the given rows of logits, each with the parameters of its slot."""
        state = self._slots
        draws = Draws(
            rows=torch.from_numpy(rows),
            temperatures=torch.from_numpy(state.temperatures[slots]),
            top_ks=torch.from_numpy(state.top_ks[slots]),
            top_ps=torch.from_numpy(state.top_ps[slots]),
            min_ps=torch.from_numpy(state.min_ps[slots]),
            uniforms=torch.from_numpy(uniforms(state.seeds[slots], positions)),
        )
        return self._kernels.draw(logits, draws)

    def _sample_edited(
        self, logits: Tensor, tokens: Tensor, rows: I64, slots: I32, positions: I32, masks: Mapping[int, Words]
    ) -> list[int]:
        """Samples the rows into tokens from an edited copy, and counts what came out. Returns the rows that had nothing left."""
        copy = self._copy(logits, torch.from_numpy(rows))
        self._edit(copy, rows, slots, positions, masks)
        best = self._kernels.argmax(copy)
        lost = _not_finite(copy, best)
        draws = self._slots.temperatures[slots[rows]] > 0
        draws[lost] = False
        if draws.any():
            places = np.flatnonzero(draws)
            best[torch.from_numpy(places)] = self._draw(copy, places, slots[rows[places]], positions[rows[places]])
        tokens[torch.from_numpy(rows)] = best
        gone = set(lost.tolist())
        for index, slot in enumerate(slots[rows].tolist()):
            if index not in gone and (penalties := self._slots.penalties.get(slot)) is not None:
                penalties.count(int(best[index]))
        return [int(rows[index]) for index in gone]

    @contextmanager
    def _contained(self, slot: int) -> Iterator[None]:
        """One slot's parameters concern that slot alone, whatever is wrong with them; the others of its step go on."""
        try:
            yield
        except Exception:
            logger.exception("the sampling parameters of slot %d could not be applied", slot)
            self._broken.add(slot)

    def _copy(self, logits: Tensor, rows: Tensor) -> Tensor:
        """float32[len(rows), V], valid until the next call."""
        if len(self._edited) < len(rows):
            self._edited = logits.new_empty((len(rows), logits.shape[1]))
        copy = self._edited[: len(rows)]
        return torch.index_select(logits, 0, rows, out=copy)

    def _edit(self, copy: Tensor, rows: I64, slots: I32, positions: I32, masks: Mapping[int, Words]) -> None:
        """Edits float32[len(rows), V] in place. What single logits lose comes first, then all sets of tokens together."""
        values, masked, words = copy.numpy(), [], []
        for index, row in enumerate(rows.tolist()):
            edits, mask = self._slots.edits.get(int(slots[row])), masks.get(row)
            if edits is not None:
                with self._contained(int(slots[row])):
                    edits.apply(values[index], int(positions[row]))
                if edits.words is not None:
                    mask = edits.words if mask is None else mask & edits.words
            if mask is not None:
                masked.append(index)
                words.append(mask)
        if len(masked) == len(copy):
            forbid_others(copy, np.stack(words))
        elif masked:
            copy[masked] = forbid_others(copy[masked], np.stack(words))
