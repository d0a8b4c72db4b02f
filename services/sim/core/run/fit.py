"""Fits a time model to measured steps: least squares of the relative error, no coefficient below zero."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan
from services.worker.exec.fake import TimeModel

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step: what it ran, in the time model's terms, and how long it took. context_tokens: sum of the rows' lengths."""

    prefill_tokens: int
    rows: int
    context_tokens: int
    seconds: float

    @classmethod
    def of(cls, plan: BatchPlan, seconds: float) -> StepTiming:
        return cls(len(plan.input_ids), plan.num_rows, int((plan.starts + plan.num_tokens).sum()), seconds)


@dataclass(frozen=True, slots=True)
class Fit:
    """r2: share of the variance of the seconds that the model explains. residual_p50, p90, p99: quantiles of
    |predicted - measured| / measured."""

    model: TimeModel
    steps: int
    r2: float
    residual_p50: float
    residual_p90: float
    residual_p99: float


def fit_time_model(timings: Sequence[StepTiming]) -> Fit:
    """Raises ValueError where there are fewer than four timings."""
    if len(timings) < 4:
        raise ValueError(f"{len(timings)} steps are too few to fit four coefficients")
    seconds = np.array([timing.seconds for timing in timings])
    if not (seconds > 0).all():
        raise ValueError("every step took more than 0 seconds")
    terms = np.array([[1, timing.prefill_tokens, timing.rows, timing.context_tokens] for timing in timings], dtype=np.float64)
    coefficients = nonnegative_least_squares(terms / seconds[:, None], np.ones(len(seconds)))
    predicted = terms @ coefficients
    residuals = np.abs(predicted - seconds) / seconds
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - float(((seconds - predicted) ** 2).sum()) / spread if spread else 1.0
    base, per_prefill_token, per_row, per_context_token = coefficients.tolist()
    return Fit(
        TimeModel(base, per_prefill_token, per_row, per_context_token),
        len(timings),
        r2,
        *(float(value) for value in np.percentile(residuals, [50, 90, 99])),
    )


def nonnegative_least_squares(a: F64, b: F64) -> F64:
    """float64[n] x >= 0 that minimises |a x - b|: the best of the least squares over every subset of columns whose solution
    is not negative. a: float64[m, n], n small."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    best, best_error = np.zeros(a.shape[1]), float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for subset in itertools.combinations(range(a.shape[1]), size):
            columns = list(subset)
            solution = np.linalg.lstsq(a[:, columns] / scale[columns], b, rcond=None)[0]
            error = float(((a[:, columns] / scale[columns] @ solution - b) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(a.shape[1]), error
                best[columns] = solution / scale[columns]
    return best


def write_timings(path: Path, timings: Iterable[StepTiming]) -> None:
    path.write_text("".join(json.dumps(asdict(timing)) + "\n" for timing in timings), encoding="utf-8")


def read_timings(path: Path) -> list[StepTiming]:
    """JSON lines of StepTiming's fields. Raises ValueError, OSError."""
    timings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            counts = (int(record["prefill_tokens"]), int(record["rows"]), int(record["context_tokens"]))
            timings.append(StepTiming(*counts, float(record["seconds"])))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not the timing of a step: {error!r}") from error
    return timings
