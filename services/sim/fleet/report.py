"""The figures of a fleet's run, and the tables they are printed as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from services.sim.core.report.report import Quantiles
from services.sim.fleet.simulation import FleetOutcome

F64 = NDArray[np.float64]
MIN_MEAN_OPEN = 4.0  # requests per worker, below which a window says nothing about balance

HEADS = (
    "policy",
    "hit rate",
    "output tok/s",
    "all tok/s",
    "TTFT p50 / p99, s",
    "E2E p50 / p99, s",
    "tokens, max/mean",
    "open, max/mean (worst)",
    "predicted/cached (error)",
)


@dataclass(frozen=True, slots=True)
class Balance:
    """The busiest worker's share of the mean one's, 1 if all are equal. tokens: prompt and output tokens of the requests it
    served. open: requests it had open, over the time in which requests were sent (where that is a moment: until all had
    ended); 0 for a run too short to say. worst_open: the same of the worst window."""

    tokens: float
    open: float
    worst_open: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of requests that were sent once: prompt tokens that gateways took for cached, those that were, and the mean of the
    difference per request, whatever its sign, over the mean prompt."""

    predicted_tokens: int
    cached_tokens: int
    mean_error: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Times in seconds of virtual time, except wall_s. ttft, e2e: from arrival at the gateway, of requests that ran to their
    end. hit_rate: cached prompt tokens over prompt tokens. reasons: decisions by the policy's word. resumed: requests that
    were sent more than once."""

    policy: str
    requests: int
    finished: int
    errors: dict[str, int]
    seconds: float
    hit_rate: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Quantiles
    e2e: Quantiles
    balance: Balance
    prediction: Prediction
    reasons: dict[str, int]
    resumed: int
    max_queue: int
    steps: int
    wall_s: float


def make_report(policy: str, outcome: FleetOutcome, num_workers: int, samples_per_window: int, wall_s: float) -> FleetReport:
    log = outcome.log.requests
    done, seconds = log.finished, max(outcome.seconds, 1e-9)
    prompt, output = int(log.prompt_tokens[done].sum()), int(log.output_tokens[done].sum())
    return FleetReport(
        policy=policy,
        requests=len(done),
        finished=int(done.sum()),
        errors=log.errors(),
        seconds=seconds,
        hit_rate=int(log.cached_tokens[done].sum()) / max(prompt, 1),
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        ttft=Quantiles.of((log.first_token - log.sent)[done]),
        e2e=Quantiles.of((log.ended - log.sent)[done]),
        balance=_balance(outcome, num_workers, samples_per_window),
        prediction=_prediction(outcome),
        reasons=dict(sorted(outcome.log.placements.reasons.items())),
        resumed=int((outcome.log.placements.sends > 1).sum()),
        max_queue=outcome.max_queue,
        steps=outcome.steps,
        wall_s=wall_s,
    )


def as_dict(report: FleetReport) -> dict[str, object]:
    return asdict(report)


def as_table(reports: Mapping[str, FleetReport]) -> str:
    """Markdown, one row per policy, and below it what the decisions were."""
    rows = [HEADS, tuple("---" for _ in HEADS), *(_row(report) for report in reports.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    table = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([*table, "", *(_decisions(report) for report in reports.values())])


def worst_window(opened: F64, samples_per_window: int) -> float:
    """The largest max/mean over whole windows of a float64[samples, workers]; one window where there are too few samples.
    Windows with hardly any request do not count; 0 if none does."""
    size = min(samples_per_window, len(opened))
    windows = [opened[at : at + size].mean(axis=0) for at in range(0, len(opened) - size + 1, size)]
    return max((_max_to_mean(window) for window in windows if window.mean() >= MIN_MEAN_OPEN), default=0.0)


def _balance(outcome: FleetOutcome, num_workers: int, samples_per_window: int) -> Balance:
    log, done = outcome.log.requests, outcome.log.requests.finished
    tokens = np.zeros(num_workers)
    np.add.at(tokens, outcome.log.placements.worker[done], (log.prompt_tokens + log.output_tokens)[done])
    opened = outcome.log.loads.open_between(float(np.nanmin(log.sent)), float(np.nanmax(log.sent)))
    if not len(opened):
        return Balance(_max_to_mean(tokens), 0.0, 0.0)
    return Balance(_max_to_mean(tokens), _max_to_mean(opened.mean(axis=0)), worst_window(opened, samples_per_window))


def _max_to_mean(values: F64) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 0.0


def _prediction(outcome: FleetOutcome) -> Prediction:
    log, placements = outcome.log.requests, outcome.log.placements
    once = log.finished & (placements.sends == 1)
    predicted, cached = placements.predicted[once], log.cached_tokens[once]
    error = float(np.abs(predicted - cached).sum()) / max(int(log.prompt_tokens[once].sum()), 1)
    return Prediction(int(predicted.sum()), int(cached.sum()), error)


def _row(report: FleetReport) -> tuple[str, ...]:
    balance, prediction = report.balance, report.prediction
    ratio = prediction.predicted_tokens / prediction.cached_tokens if prediction.cached_tokens else float("nan")
    return (
        report.policy,
        f"{report.hit_rate:.1%}",
        f"{report.output_tokens_per_s:,.0f}",
        f"{report.total_tokens_per_s:,.0f}",
        f"{report.ttft.p50:.2f} / {report.ttft.p99:.2f}",
        f"{report.e2e.p50:.2f} / {report.e2e.p99:.2f}",
        f"{balance.tokens:.2f}",
        f"{balance.open:.2f} ({balance.worst_open:.2f})",
        f"{ratio:.2f} ({prediction.mean_error:.1%})",
    )


def _decisions(report: FleetReport) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.reasons.items())
    errors = "".join(f", {count:,} {name}" for name, count in report.errors.items())
    ends = f"{report.finished:,} of {report.requests:,} finished{errors} in {report.seconds:,.1f} s"
    resumed = f"; {report.resumed:,} sent more than once" if report.resumed else ""
    return f"{report.policy}: {ends}; {reasons}{resumed}; {report.steps:,} steps simulated in {report.wall_s:.1f} s"
