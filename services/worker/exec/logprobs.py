"""Log probabilities of sampled and of prompt tokens: natural, fp32, of the raw logits. Called by the forward thread alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.core.contracts.plan import I32, BatchPlan, PromptLogprobs, RowFault, RowLogprobs, SlotParams

PIECE_BYTES = 64 << 20  # of a prompt's float32 logits made in one go: bounds the memory, whatever the chunk
BLOCK_BYTES = 4 << 20  # of logits measured in one go: what that takes is soon in the cache, and soon there again

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of n tokens: float32[n] their own, int64[n, k] and float32[n, k] the top ones, float32[n] the log of each row's mass."""

    values: Tensor
    top_ids: Tensor
    top: Tensor
    mass: Tensor


def _spans(count: int, size: int) -> Iterator[tuple[int, int]]:
    """First and end of consecutive spans of at most size, 0 .. count together."""
    for first in range(0, count, size):
        yield first, min(count, first + size)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """By row of the plan. A row whose logits are not finite stands in both."""

    logprobs: dict[int, PromptLogprobs]
    faults: dict[int, RowFault]


def _measure(logits: Tensor, tokens: Tensor, num_top: int) -> _Measured:
    """logits: float32[n, V], left as they are; tokens: int64[n]."""
    mass = logits.logsumexp(-1)
    values = logits.gather(1, tokens[:, None]).squeeze(1) - mass
    if not num_top:
        return _Measured(values, torch.empty((len(logits), 0), dtype=torch.int64), torch.empty((len(logits), 0)), mass)
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return _Measured(values, top.indices, top.values - mass[:, None], mass)


class Logprobs:
    """What each slot wants to hear, and the numbers."""

    def __init__(self, max_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._piece_rows = max(1, PIECE_BYTES // (4 * vocab_size))
        self._block_rows = max(1, BLOCK_BYTES // (4 * vocab_size))
        self._num_top = np.full(max_slots, -1, dtype=np.int64)
        self._chosen: dict[int, Tensor] = {}

    def admit(self, slot: SlotParams) -> None:
        params, index = slot.params, slot.slot
        self._num_top[index] = params.top_logprobs
        self._chosen.pop(index, None)
        if params.logprob_token_ids:
            self._chosen[index] = torch.tensor(params.logprob_token_ids, dtype=torch.int64)

    def _chosen_values(self, logits: Tensor, mass: Tensor, slot: int) -> Tensor:
        """float32[n, m], in the order of logprob_token_ids; -inf for an id outside the vocabulary. logits: [n, V]."""
        ids = self._chosen.get(slot)
        if ids is None:
            return logits.new_empty((len(logits), 0))
        values = logits[:, ids.clamp(0, self._vocab_size - 1)] - mass[:, None]
        return values.masked_fill_((ids < 0) | (ids >= self._vocab_size), -torch.inf)

    def of_outputs(self, logits: Tensor, slots: I32, tokens: Tensor, faults: dict[int, RowFault]) -> dict[int, RowLogprobs]:
        """By index into the n rows: of those whose slot wants any and that have no fault. logits: float32[n, V]."""
        rows = [row for row in np.flatnonzero(self._num_top[slots] >= 0).tolist() if row not in faults]
        result: dict[int, RowLogprobs] = {}
        for first, end in _spans(len(rows), self._block_rows):
            block = rows[first:end]
            result.update(zip(block, self._outputs(logits[block], slots[block], tokens[block]), strict=True))
        return result

    def _outputs(self, logits: Tensor, slots: I32, tokens: Tensor) -> list[RowLogprobs]:
        nums = self._num_top[slots]
        measured = _measure(logits, tokens, int(nums.max()))
        columns = zip(
            slots.tolist(), nums.tolist(), measured.values.tolist(), measured.top_ids.tolist(), measured.top.tolist(), strict=True
        )
        return [
            RowLogprobs(value, tuple(top_ids[:num]), tuple(top[:num]), self._chosen_of_row(logits, measured.mass, index, slot))
            for index, (slot, num, value, top_ids, top) in enumerate(columns)
        ]

    def _chosen_of_row(self, logits: Tensor, mass: Tensor, row: int, slot: int) -> tuple[float, ...]:
        if slot not in self._chosen:
            return ()
        return tuple(self._chosen_values(logits[row : row + 1], mass[row : row + 1], slot)[0].tolist())

    def of_prompts(self, plan: BatchPlan, logits: Logits) -> PromptScores:
        """Of the plan's prompt_logprob_rows. logits: int64[W] indices into the step's tokens -> float32[W, V]."""
        scores = PromptScores({}, {})
        offsets = np.cumsum(plan.num_tokens) - plan.num_tokens
        columns = (plan.prompt_logprob_rows, plan.prompt_logprob_offsets, plan.prompt_logprob_nexts)
        for row, skipped, after in zip(*(column.tolist() for column in columns), strict=True):
            first, end = int(offsets[row]) + skipped, int(offsets[row] + plan.num_tokens[row])
            targets = np.append(plan.input_ids[first + 1 : end], after).astype(np.int64)
            known = targets if after >= 0 else targets[:-1]
            scores.logprobs[row], sound = self._of_prompt(int(plan.slots[row]), first, known, logits)
            if not sound:
                scores.faults[row] = RowFault.NAN_LOGITS
        return scores

    def _of_prompt(self, slot: int, first: int, targets: NDArray[np.int64], logits: Logits) -> tuple[PromptLogprobs, bool]:
        """Of targets[i], predicted by the step's token first + i; and whether all their logits are sound: no NaN, no +inf."""
        num_top, wanted = max(0, int(self._num_top[slot])), torch.from_numpy(targets).clamp_(0, self._vocab_size - 1)
        parts, sound = [self._nothing(slot, min(num_top, self._vocab_size))], True
        for begin, end in _spans(len(targets), self._piece_rows):
            made, tokens = logits(torch.arange(first + begin, first + end)), wanted[begin:end]
            for low, high in _spans(end - begin, self._block_rows):
                rows, measured = made[low:high], _measure(made[low:high], tokens[low:high], num_top)
                parts.append((measured.values, measured.top_ids, measured.top, self._chosen_values(rows, measured.mass, slot)))
                sound = sound and bool(measured.mass.isfinite().all())
        values, top_ids, top, chosen = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
        return PromptLogprobs(values, top_ids.astype(np.int32), top, chosen), sound

    def _nothing(self, slot: int, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Columns of no token, which give the others their widths."""
        shapes = ((0,), (0, num_top), (0, num_top), (0, len(self._chosen.get(slot, ()))))
        values, top_ids, top, chosen = (torch.empty(shape) for shape in shapes)
        return values, top_ids.long(), top, chosen
