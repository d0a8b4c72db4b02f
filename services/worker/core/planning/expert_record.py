"""The expert distribution record: counts of rows per sparse layer and expert, over the steps that are planned while it runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.experts import ExpertDistribution, ExpertShape
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, StepResult


class ExpertRecord:
    """Adds up the rows of each expert. The planner marks the steps that count, and the scheduler adds their results.

    The counts stay after stop(), until the next start().
    """

    def __init__(self, shape: ExpertShape | None) -> None:
        """Begins without a record. `shape` is None if the model has no experts, or if the executor cannot count their rows."""
        self.shape = shape
        self.is_running = False
        self._num_tokens = 0
        self._rows: NDArray[np.int64] | None = None  # int64[layers, experts]; None before the first start()
        # Mean over the layers of (mean number of rows of the layer's experts / largest number); 0: no rows.
        self.balancedness = 0.0

    def start(self) -> None:
        """Begins a new record with counts of 0. The model has experts, and no record runs."""
        assert self.shape is not None and not self.is_running, "a record runs at most once, and only for a model with experts"
        self._rows = np.zeros((len(self.shape.layers), self.shape.num_experts), dtype=np.int64)
        self._num_tokens, self.balancedness, self.is_running = 0, 0.0, True

    def stop(self) -> None:
        """Ends the record. The result of a step in flight still counts."""
        self.is_running = False

    def add(self, plan: BatchPlan, result: StepResult) -> None:
        """Adds the counts of a step. Does nothing if the plan did not ask for them."""
        if result.expert_rows is None:
            return
        assert plan.counts_experts and self._rows is not None, "a step counts experts only if its plan asks for it"
        assert result.expert_rows.shape == self._rows.shape, "the executor counts the experts of the loaded model"
        self._rows += result.expert_rows
        decoded = plan.num_rows - plan.num_extend if result.counts is None else int(result.counts[plan.num_extend :].sum())
        self._num_tokens += int(plan.num_tokens[: plan.num_extend].sum()) + decoded
        largest = np.maximum(self._rows.max(axis=1), 1)
        self.balancedness = float((self._rows.mean(axis=1) / largest).mean())

    def distribution(self) -> ExpertDistribution | None:
        """Returns a copy of the counts since the last start(), or None if no record was started."""
        if self._rows is None or self.shape is None:
            return None
        return ExpertDistribution(self.shape, self.is_running, self._num_tokens, self._rows.copy(), self.balancedness)
