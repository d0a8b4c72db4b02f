"""Makes the embedding of a request from hidden states: pools them over chunks, cuts and normalizes the vector.

The thread that launches steps makes all calls.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, EmbeddingParams, RowFault, SlotParams

States = Callable[[Tensor], Tensor]  # TokenModel.states()


class PoolingKind(enum.StrEnum):
    LAST = "last"
    MEAN = "mean"
    CLS = "cls"  # the first token


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The pooling of a model, from its files."""

    kind: PoolingKind
    normalize: bool  # whether vectors are scaled to length 1 if the request does not set EmbeddingParams.normalize


def finite_vectors(vectors: Mapping[int, Tensor]) -> tuple[dict[int, NDArray[np.float32]], dict[int, RowFault]]:
    """Separates vectors that are not finite.

    Returns:
        The finite vectors on the host, float32[dimensions], by row of the plan, and faults for the other rows.
    """
    finite = {row: bool(vector.isfinite().all()) for row, vector in vectors.items()}
    found = {row: vector.numpy() for row, vector in vectors.items() if finite[row]}
    return found, {row: RowFault.NAN_LOGITS for row in vectors if not finite[row]}


@dataclass(slots=True)
class _Pooled:
    """The sum of the hidden states of the tokens of one slot's prompt that were pooled so far."""

    params: EmbeddingParams
    total: Tensor | None = None  # float32[hidden], sum of the states of pooled tokens; None before the first token
    count: int = 0  # number of tokens in the sum
    end: int = 0  # position after the last token in the sum; earlier tokens are not added again if a step is repeated

    def add(self, states: Tensor, in_order: bool) -> None:
        """Adds states of tokens.

        Args:
            states: [tokens, hidden] in the model dtype.
            in_order: whether to add one token after another, so that the bits of the sum do not depend on the chunks of the
                prompt.
        """
        assert states.dim() == 2 and len(states) > 0, "there are states of tokens to add"
        if in_order:
            summed = states.new_zeros(states.shape[1], dtype=torch.float32) if self.total is None else self.total
            for state in states:
                summed = summed + state
            self.total = summed
        else:
            summed = states.sum(0, dtype=torch.float32)
            self.total = summed if self.total is None else self.total + summed
        assert len(states) > 0 and summed.shape == self.total.shape, "all states have the same size"
        self.count += len(states)

    def vector(self, normalize: bool) -> Tensor:
        """Returns float32[dimensions]: the mean of the added states, cut and normalized as requested."""
        if self.total is None:
            raise RuntimeError("an embedding is requested before the states of any pooled token were added")
        assert 0 < self.count <= self.end, "the sum has at most as many tokens as positions before its end"
        mean = self.total / self.count
        cut = mean[: self.params.dimensions] if self.params.dimensions else mean
        wanted = normalize if self.params.normalize is None else self.params.normalize
        return torch.nn.functional.normalize(cut, dim=0) if wanted else cut


class EmbeddingPool:
    """The sums of all slots whose requests ask for an embedding. A sum begins with the admission of the request.

    Pooling by the mean or the first token needs states from the first token on, so such a request must not use a cached prefix.
    """

    def __init__(self, config: PoolingConfig, device: torch.device | None = None, in_order: bool = False) -> None:
        """Starts without sums.

        Args:
            config: pooling of the model.
            device: device of the states, None for the CPU.
            in_order: see _Pooled.add().
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
        """Whether no slot's request asks for an embedding."""
        return not self._pools

    def pool(self, plan: BatchPlan, states: States) -> dict[int, Tensor]:
        """Adds the states of the step's tokens to the sums, and computes the embeddings of rows that end a prompt (plan.sample).

        Args:
            plan: the step's plan.
            states: returns the hidden states after the final norm, [W, hidden], for int64[W] indices into the step's tokens.

        Returns:
            float32[dimensions] by row of the plan.
        """
        assert plan.num_extend <= plan.num_rows == len(plan.num_tokens), "there are at most as many extend rows as rows"
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
            assert 0 <= first <= last <= int(plan.num_tokens[row]), "the pooled tokens are inside the row"
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
        """Returns the range [first, end) of the pooled tokens within the row."""
        count = int(plan.num_tokens[row])
        if self._config.kind == PoolingKind.MEAN:
            return 0, count
        if self._config.kind == PoolingKind.CLS:
            return 0, int(plan.starts[row] == 0)
        return (count - 1, count) if plan.sample[row] else (0, 0)
