"""Records a simulation: one row per step, per sample of the gauges and per request, in columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.run.executor import SimRun
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason

F64 = NDArray[np.float64]

STEP_COLUMNS = (
    "begin",  # time at which the device began the step
    "end",  # time at which the device ended the step
    "mode",  # ForwardMode
    "rows",  # number of rows
    "prefill_tokens",  # tokens of the extend rows
)
GAUGE_COLUMNS = (
    "at",  # time of the sample
    "running",  # running requests
    "waiting",  # waiting requests
    "pages_in_use",  # pages that are leased, or cached and pinned
    "pages_cached",  # pages in the radix tree that can be evicted
    "generated",  # output tokens since the start of the run
    "retractions",  # retractions since the start of the run
)


class _Table:
    """Rows of numbers that grow by one row at a time."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._rows = np.empty((1024, len(columns)))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, *values: float) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._count] = values
        self._count += 1

    def column(self, name: str) -> F64:
        return self._rows[: self._count, self._columns.index(name)]


class StepLog:
    """The steps of a run, and samples of the scheduler's gauges.

    The gauges are sampled directly after a step is planned, and when the worker begins to wait without a step.
    """

    def __init__(self) -> None:
        self._steps, self._gauges = _Table(STEP_COLUMNS), _Table(GAUGE_COLUMNS)

    def __len__(self) -> int:
        """Returns the number of steps."""
        return len(self._steps)

    def add(self, run: SimRun) -> None:
        plan = run.plan
        self._steps.add(run.begin, run.end, plan.mode, plan.num_rows, len(plan.input_ids))

    def sample(self, at: float, stats: StepStats) -> None:
        self._gauges.add(
            at,
            stats.num_running,
            stats.num_waiting,
            stats.pages_used,
            stats.pages_evictable,
            stats.generated_tokens_total,
            stats.retractions_total,
        )

    def column(self, name: str) -> F64:
        """Returns a column of STEP_COLUMNS, float64[steps], as a view."""
        return self._steps.column(name)

    def gauge(self, name: str) -> F64:
        """Returns a column of GAUGE_COLUMNS, float64[samples], as a view."""
        return self._gauges.column(name)

    def throughput(self, begin: float, end: float) -> float:
        """Returns the mean number of output tokens that were committed per second between two times."""
        at = np.interp([begin, end], self.gauge("at"), self.gauge("generated"))
        return float(at[1] - at[0]) / (end - begin)


class RequestLog:
    """The requests of a run, in columns by index in the trace. A time is NaN until its event."""

    def __init__(self, count: int) -> None:
        self.constrained = np.zeros(count, dtype=np.bool_)  # whether the request has a grammar
        self._last_output = np.full(count, np.nan)
        self._gaps: list[F64] = []
        self.sent = np.full(count, np.nan)
        self.first_token = np.full(count, np.nan)
        self.ended = np.full(count, np.nan)
        self.queue = np.full(count, np.nan)  # seconds from arrival at the scheduler to the first admission
        self.prompt_tokens = np.zeros(count, dtype=np.int64)
        self.cached_tokens = np.zeros(count, dtype=np.int64)
        self.output_tokens = np.zeros(count, dtype=np.int64)  # number of output tokens that the request's Finish reports
        self.streamed_tokens = np.zeros(count, dtype=np.int64)  # number of tokens in the request's messages
        self.reason = np.zeros(count, dtype=np.int8)  # a FinishReason; 0 before the end
        self.error = np.zeros(count, dtype=np.int8)  # an ErrorCode; 0 without an error

    def add_outputs(self, handles: Sequence[int], counts: Sequence[int], now: float) -> None:
        """Records the rows of one step's output. A handle may occur in several rows."""
        indexes = np.array(handles, dtype=np.int64)
        np.add.at(self.streamed_tokens, indexes, counts)
        fresh = indexes[np.isnan(self.first_token[indexes])]
        self.first_token[fresh] = now
        plain = indexes[~self.constrained[indexes]]
        self._gaps.append(now - self._last_output[plain])
        self._last_output[plain] = now

    def gaps(self) -> F64:
        """Returns float64[n]: the seconds between successive outputs of a request, for all requests without a grammar."""
        gaps: F64 = np.concatenate([np.empty(0), *self._gaps])
        known: F64 = gaps[~np.isnan(gaps)]
        return known

    def end(self, finish: Finish, now: float) -> None:
        index = finish.handle
        assert not self.reason[index], f"request {index} finishes once"
        self.reason[index], self.error[index] = finish.reason, finish.error
        self.ended[index], self.queue[index] = now, finish.queue_s
        self.prompt_tokens[index], self.cached_tokens[index] = finish.prompt_tokens, finish.cached_tokens
        self.output_tokens[index] = finish.completion_tokens

    @property
    def finished(self) -> NDArray[np.bool_]:
        """bool[requests]: whether the request has ended without an error."""
        return np.isin(self.reason, [reason for reason in FinishReason if reason is not FinishReason.ABORT])

    def errors(self) -> dict[str, int]:
        """Returns the number of requests per error name."""
        codes, counts = np.unique(self.error[self.error > 0], return_counts=True)
        return {ErrorCode(code).name.lower(): count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
