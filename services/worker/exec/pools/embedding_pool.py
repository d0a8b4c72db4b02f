"""Turns hidden states into one vector per request: pooling over chunks, cut, normalisation. Called by the launching thread."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, EmbeddingParams, RowFault, SlotParams

States = Callable[[Tensor], Tensor]


class PoolingKind(enum.StrEnum):
    LAST = "last"
    MEAN = "mean"
    CLS = "cls"  # the first token


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The pooling of a model, from its files."""

    kind: PoolingKind
    normalize: bool  # scale vectors to length 1, unless the request chooses otherwise


def finite_vectors(vectors: Mapping[int, Tensor]) -> tuple[dict[int, NDArray[np.float32]], dict[int, RowFault]]:
    """Returns vectors on the host, float32[dimensions], and faults, by row of the plan.

    A row whose vector is not finite has only a fault.
    """
    sound = {row: bool(vector.isfinite().all()) for row, vector in vectors.items()}
    found = {row: vector.numpy() for row, vector in vectors.items() if sound[row]}
    return found, {row: RowFault.NAN_LOGITS for row in vectors if not sound[row]}


@dataclass(slots=True)
class _Pooled:
    """The sum over one slot's prompt so far."""

    params: EmbeddingParams
    total: Tensor | None = None  # float32[hidden], sum of the states of the pooled tokens; unset before the first of them
    count: int = 0  # number of tokens in the sum
    end: int = 0  # position after the last token in the sum, so that a repeated step adds nothing twice

    def add(self, states: Tensor, in_order: bool) -> None:
        """Adds states of tokens.

        Args:
            states: [tokens, hidden] in the model dtype.
            in_order: add one token after the other, so that the cut of a prompt into chunks does not change the bits of the sum.
        """
        assert states.dim() == 2 and len(states) > 0, "tokens that count"
        if in_order:
            summed = states.new_zeros(states.shape[1], dtype=torch.float32) if self.total is None else self.total
            for state in states:
                summed = summed + state
            self.total = summed
        else:
            summed = states.sum(0, dtype=torch.float32)
            self.total = summed if self.total is None else self.total + summed
        assert len(states) > 0 and summed.shape == self.total.shape, "all states of a vector are equally wide"
        self.count += len(states)

    def vector(self, normalize: bool) -> Tensor:
        """Returns float32[dimensions]: the mean of the added states, cut and normalised as requested."""
        if self.total is None:
            raise RuntimeError("a vector is requested, but none of its pooled tokens was computed")
        assert 0 < self.count <= self.end, "a prompt has as many tokens as were computed"
        mean = self.total / self.count
        cut = mean[: self.params.dimensions] if self.params.dimensions else mean
        wanted = normalize if self.params.normalize is None else self.params.normalize
        return torch.nn.functional.normalize(cut, dim=0) if wanted else cut


class EmbeddingPool:
    """The sums of all slots whose requests ask for a vector. A sum begins when the request is admitted to the slot.

    Mean and first-token pooling need all prompt tokens, so that such requests must not have a prefix hit.
    """

    def __init__(self, config: PoolingConfig, device: torch.device | None = None, in_order: bool = False) -> None:
        """Starts without pools.

        Args:
            config: pooling of the model.
            device: device of the states, None for the CPU.
            in_order: sums add one token after the other.
        """
        self._config, self._in_order = config, in_order
        self._device = device
        self._pools: dict[int, _Pooled] = {}

    def admit(self, slot: SlotParams) -> None:
        self._pools.pop(slot.slot, None)
        if slot.params.embedding is not None:
            self._pools[slot.slot] = _Pooled(slot.params.embedding)

    @property
    def empty(self) -> bool:
        """Whether no slot's request wants a vector."""
        return not self._pools

    def pool(self, plan: BatchPlan, states: States) -> dict[int, Tensor]:
        """Adds the step's tokens, and returns float32[dimensions] for the rows with `sample` set, by row of the plan.

        Args:
            plan: the step's plan.
            states: returns the hidden states after the final norm, [W, hidden], for int64[W] indices into the step's tokens.
        """
        assert plan.num_extend <= plan.num_rows == len(plan.num_tokens), "extend rows are the first of all rows"
        vectors: dict[int, Tensor] = {}
        if self.empty:
            return vectors
        offsets = np.cumsum(plan.num_tokens) - plan.num_tokens
        for row in range(plan.num_extend):
            pooled = self._pools.get(int(plan.slots[row]))
            if pooled is None:
                continue
            assert int(plan.starts[row]) <= pooled.end or self._config.kind != PoolingKind.MEAN, "a mean leaves no token out"
            first, last = self._counted(plan, row)
            assert 0 <= first <= last <= int(plan.num_tokens[row]), "what counts lies inside the row"
            first = max(first, pooled.end - int(plan.starts[row]))
            if first < last:
                start = int(offsets[row])
                pooled.add(states(torch.arange(start + first, start + last, device=self._device)), self._in_order)
                pooled.end = int(plan.starts[row]) + last
                assert pooled.count <= pooled.end, "no position counts twice"
            if plan.sample[row]:
                vectors[row] = pooled.vector(self._config.normalize)
        return vectors

    def _counted(self, plan: BatchPlan, row: int) -> tuple[int, int]:
        """Returns the range, within the row, of the tokens that are pooled."""
        count = int(plan.num_tokens[row])
        if self._config.kind == PoolingKind.MEAN:
            return 0, count
        if self._config.kind == PoolingKind.CLS:
            return 0, int(plan.starts[row] == 0)
        return (count - 1, count) if plan.sample[row] else (0, 0)
