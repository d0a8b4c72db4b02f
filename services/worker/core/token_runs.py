"""The tokens of a step whose rows have several: each row's run, and what the result says of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan, StepResult

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """counts, firsts, drafted: int64[rows], tokens of each row's run, the place of its first, and guesses that it had. result:
    the step's, with faults and embeddings by place too: those of a run's last token."""

    counts: I64
    firsts: I64
    drafted: I64
    result: StepResult

    @classmethod
    def of(cls, plan: BatchPlan, result: StepResult) -> TokenRuns:
        assert result.counts is not None and len(result.counts) == plan.num_rows, "a count for every row"
        counts = result.counts.astype(np.int64)
        firsts = np.cumsum(counts) - counts
        assert len(result.tokens) == counts.sum() and (not len(counts) or counts.min() > 0), "a token for every row, at least"
        assert (counts[: plan.num_extend] == 1).all(), "what is known is not sampled again"
        drafted = np.zeros_like(counts) if result.drafted is None else result.drafted.astype(np.int64)
        assert not len(plan.drafts) or (drafted <= plan.drafts).all(), "no more is drafted than was planned"
        assert (counts <= drafted + 1).all(), "no more than was drafted, and one"
        faults = {int(firsts[row] + counts[row]) - 1: fault for row, fault in result.faults.items()}
        embeddings = {int(firsts[row]): vector for row, vector in result.embeddings.items()}
        return cls(counts, firsts, drafted, replace(result, faults=faults, embeddings=embeddings))

    def places(self, row: int) -> range:
        first = int(self.firsts[row])
        return range(first, first + int(self.counts[row]))
