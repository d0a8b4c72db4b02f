"""What a simulation writes down: a row per step and a row per request, in columns that grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.sim.core.run.executor import SimRun
from services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason
from services.worker.core.stats import StepStats

F64 = NDArray[np.float64]

STEP_COLUMNS = (
    "begin",
    "end",
    "mode",
    "rows",
    "prefill_tokens",
    "planned",
    "running",
    "waiting",
    "pages_in_use",
    "pages_cached",
    "generated",
    "retractions",
)


class StepLog:
    """begin, end: when the device ran the step. planned: when it was planned; running, waiting, pages_in_use (leased, or
    cached and pinned), pages_cached (in the radix tree and evictable), generated and retractions (totals): as they were then."""

    def __init__(self) -> None:
        self._rows = np.empty((1024, len(STEP_COLUMNS)))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, run: SimRun, planned: float, stats: StepStats) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        plan = run.plan
        self._rows[self._count] = (
            run.begin,
            run.end,
            plan.mode,
            plan.num_rows,
            len(plan.input_ids),
            planned,
            stats.num_running,
            stats.num_waiting,
            stats.pages_used,
            stats.pages_evictable,
            stats.generated_tokens_total,
            stats.retractions_total,
        )
        self._count += 1

    def column(self, name: str) -> F64:
        """float64[steps]; a view."""
        return self._rows[: self._count, STEP_COLUMNS.index(name)]

    def throughput(self, begin: float, end: float) -> float:
        """Output tokens per second that were committed in that time."""
        at = np.interp([begin, end], self.column("planned"), self.column("generated"))
        return float(at[1] - at[0]) / (end - begin)


class RequestLog:
    """Columns by place in the trace; times are NaN until they have come. error: an ErrorCode; reason: a FinishReason, 0 before
    the end. output_tokens: as the terminal output counts them; told_tokens: as they were given out step by step. constrained:
    with a grammar."""

    def __init__(self, count: int) -> None:
        self.constrained = np.zeros(count, dtype=np.bool_)
        self._told_at = np.full(count, np.nan)
        self._gaps: list[F64] = []
        self.sent = np.full(count, np.nan)
        self.first_token = np.full(count, np.nan)
        self.ended = np.full(count, np.nan)
        self.queue = np.full(count, np.nan)
        self.prompt_tokens = np.zeros(count, dtype=np.int64)
        self.cached_tokens = np.zeros(count, dtype=np.int64)
        self.output_tokens = np.zeros(count, dtype=np.int64)
        self.told_tokens = np.zeros(count, dtype=np.int64)
        self.reason = np.zeros(count, dtype=np.int8)
        self.error = np.zeros(count, dtype=np.int8)

    def told(self, handles: Sequence[int], counts: Sequence[int], now: float) -> None:
        """Rows of one step's output; a handle may stand in more than one of them."""
        indexes = np.array(handles, dtype=np.int64)
        np.add.at(self.told_tokens, indexes, counts)
        fresh = indexes[np.isnan(self.first_token[indexes])]
        self.first_token[fresh] = now
        plain = indexes[~self.constrained[indexes]]
        self._gaps.append(now - self._told_at[plain])
        self._told_at[plain] = now

    def gaps(self) -> F64:
        """float64[n]: seconds from one message of a request without a grammar to its next."""
        gaps: F64 = np.concatenate([np.empty(0), *self._gaps])
        told: F64 = gaps[~np.isnan(gaps)]
        return told

    def end(self, finish: Finish, now: float) -> None:
        index = finish.handle
        assert not self.reason[index], f"request {index} has two terminal outputs"
        self.reason[index], self.error[index] = finish.reason, finish.error
        self.ended[index], self.queue[index] = now, finish.queue_s
        self.prompt_tokens[index], self.cached_tokens[index] = finish.prompt_tokens, finish.cached_tokens
        self.output_tokens[index] = finish.completion_tokens

    @property
    def finished(self) -> NDArray[np.bool_]:
        """bool[requests]: ended, and not by an error."""
        return np.isin(self.reason, [reason for reason in FinishReason if reason is not FinishReason.ABORT])

    def errors(self) -> dict[str, int]:
        """How many requests ended with each error, by name."""
        codes, counts = np.unique(self.error[self.error > 0], return_counts=True)
        return {ErrorCode(code).name.lower(): count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
