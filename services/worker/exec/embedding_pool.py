"""From hidden states to one vector per request: pooling over chunks, cut, normalisation. Called by the forward thread alone."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.core.plan import I32, BatchPlan, RowFault, SlotParams
from services.worker.core.sampling import EmbeddingParams

States = Callable[[Tensor], Tensor]


class PoolingKind(enum.StrEnum):
    LAST = "last"
    MEAN = "mean"
    CLS = "cls"  # the first token


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """What the model's files say. normalize: to length 1, unless the request says otherwise."""

    kind: PoolingKind
    normalize: bool


@dataclass(frozen=True, slots=True)
class Embedded:
    """By row of the plan. vectors: float32[dimensions]; a row stands in one of the two."""

    vectors: dict[int, NDArray[np.float32]]
    faults: dict[int, RowFault]


@dataclass(slots=True)
class _Pooled:
    """One slot's prompt so far. total: float32[hidden], of the tokens that count; None before the first of them."""

    params: EmbeddingParams
    total: Tensor | None = None
    count: int = 0

    def add(self, states: Tensor) -> None:
        """states: [tokens, hidden], in the model dtype."""
        summed = states.sum(0, dtype=torch.float32)
        self.total = summed if self.total is None else self.total + summed
        self.count += len(states)

    def vector(self, normalize: bool) -> Tensor:
        """float32[dimensions]: the mean of what was added, which of one token is that token."""
        if self.total is None:
            raise RuntimeError("a vector is due, but no token that counts for it was computed")
        mean = self.total / self.count
        cut = mean[: self.params.dimensions] if self.params.dimensions else mean
        wanted = normalize if self.params.normalize is None else self.params.normalize
        return torch.nn.functional.normalize(cut, dim=0) if wanted else cut


class EmbeddingPool:
    """Pools of the slots whose requests want a vector, each from its slot's admission until the next one.

    Mean and first-token pooling need every prompt token computed from the admission on: no hit in the prefix cache.
    """

    def __init__(self, config: PoolingConfig, max_slots: int) -> None:
        self._config = config
        self._pools: dict[int, _Pooled] = {}
        self._wanted = np.zeros(max_slots, dtype=np.bool_)

    def admit(self, slot: SlotParams) -> None:
        self._pools.pop(slot.slot, None)
        self._wanted[slot.slot] = slot.params.embedding is not None
        if slot.params.embedding is not None:
            self._pools[slot.slot] = _Pooled(slot.params.embedding)

    def wanted(self, slots: I32) -> NDArray[np.bool_]:
        """bool[n]: those whose request wants a vector, and so no token."""
        return self._wanted[slots]

    def pool(self, plan: BatchPlan, states: States) -> Embedded:
        """Takes in the step's tokens and gives the vectors of rows with sample set.

        states: int64[W] indices into the step's tokens -> [W, hidden], their final-norm hidden states.
        """
        result = Embedded({}, {})
        offsets = np.cumsum(plan.num_tokens) - plan.num_tokens
        for row in range(plan.num_extend):
            pooled = self._pools.get(int(plan.slots[row]))
            if pooled is None:
                continue
            first, last = self._counted(plan, row)
            if first < last:
                pooled.add(states(torch.arange(first, last) + int(offsets[row])))
            if plan.sample[row]:
                self._finish(row, pooled, result)
        return result

    def _counted(self, plan: BatchPlan, row: int) -> tuple[int, int]:
        """First and end, within the row, of the tokens that count for its vector."""
        count = int(plan.num_tokens[row])
        if self._config.kind == PoolingKind.MEAN:
            return 0, count
        if self._config.kind == PoolingKind.CLS:
            return 0, int(plan.starts[row] == 0)
        return (count - 1, count) if plan.sample[row] else (0, 0)

    def _finish(self, row: int, pooled: _Pooled, result: Embedded) -> None:
        vector = pooled.vector(self._config.normalize)
        if vector.isfinite().all():
            result.vectors[row] = vector.numpy()
        else:
            result.faults[row] = RowFault.NAN_LOGITS
