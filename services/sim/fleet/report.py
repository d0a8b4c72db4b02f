"""The figures of a fleet's run, and the tables they are printed as."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from services.sim.core.report.report import Quantiles
from services.sim.fleet.role_report import RoleReport, role_report
from services.sim.fleet.simulation import FleetOutcome

F64 = NDArray[np.float64]
MIN_MEAN_OPEN = 4.0  # requests per worker, below which a window says nothing about balance


@dataclass(frozen=True, slots=True)
class Balance:
    """The busiest worker's share of the mean one's, 1 if all are equal. tokens: prompt and output tokens of the requests it
    served. open: requests it had open, over the time in which requests were sent (where that is a moment: until all had
    ended); 0 for a run too short to say. worst_open: the same of the worst window. With roles: among those that decode."""

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
    end. hit_rate: cached prompt tokens over prompt tokens. itl: between two messages of a request. busy: share of the
    time in which devices ran steps. reasons: decisions by the policy's word. resumed: requests that were sent once more, not
    counting those that were handed over. roles: None where all workers do both."""

    policy: str
    requests: int
    finished: int
    errors: dict[str, int]
    seconds: float
    hit_rate: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft: Quantiles
    e2e: Quantiles
    itl: Quantiles
    busy: float
    balance: Balance
    prediction: Prediction
    reasons: dict[str, int]
    resumed: int
    max_queue: int
    steps: int
    wall_s: float
    roles: RoleReport | None = None


def make_report(policy: str, outcome: FleetOutcome, samples_per_window: int, wall_s: float) -> FleetReport:
    config, log = outcome.config, outcome.log.requests
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
        requests_per_s=int(done.sum()) / seconds,
        ttft=Quantiles.of((log.first_token - log.sent)[done & (log.output_tokens > 0)]),
        e2e=Quantiles.of((log.ended - log.sent)[done]),
        itl=Quantiles.of(log.gaps()),
        busy=sum(tally.busy_s for tally in outcome.tallies) / (config.workers * seconds),
        balance=_balance(outcome, samples_per_window),
        prediction=_prediction(outcome),
        reasons=dict(sorted(outcome.log.placements.reasons.items())),
        resumed=int((_sends(outcome) > 1).sum()),
        max_queue=outcome.max_queue,
        steps=outcome.steps,
        wall_s=wall_s,
        roles=None if config.roles is None else role_report(outcome, config.roles),
    )


def as_dict(report: FleetReport) -> dict[str, object]:
    return asdict(report)


def worst_window(opened: F64, samples_per_window: int) -> float:
    """The largest max/mean over whole windows of a float64[samples, workers]; one window where there are too few samples.
    Windows with hardly any request do not count; 0 if none does."""
    size = min(samples_per_window, len(opened))
    windows = [opened[at : at + size].mean(axis=0) for at in range(0, len(opened) - size + 1, size)]
    return max((_max_to_mean(window) for window in windows if window.mean() >= MIN_MEAN_OPEN), default=0.0)


def _sends(outcome: FleetOutcome) -> NDArray[np.int64]:
    """int64[requests]: how often each was sent to where it was to begin or go on, each hand-over aside."""
    sends: NDArray[np.int64] = outcome.log.placements.sends - outcome.log.handovers.count
    return sends


def _balance(outcome: FleetOutcome, samples_per_window: int) -> Balance:
    log, done, first = outcome.log.requests, outcome.log.requests.finished, outcome.config.prefill_workers
    by_worker = np.zeros(outcome.config.workers)
    np.add.at(by_worker, outcome.log.placements.worker[done], (log.prompt_tokens + log.output_tokens)[done])
    tokens = by_worker[first:]
    opened = outcome.log.loads.open_between(float(np.nanmin(log.sent)), float(np.nanmax(log.sent)))
    if not len(opened):
        return Balance(_max_to_mean(tokens), 0.0, 0.0)
    opened = opened[:, first:]
    return Balance(_max_to_mean(tokens), _max_to_mean(opened.mean(axis=0)), worst_window(opened, samples_per_window))


def _max_to_mean(values: F64) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 0.0


def _prediction(outcome: FleetOutcome) -> Prediction:
    log, placements = outcome.log.requests, outcome.log.placements
    once = log.finished & (_sends(outcome) == 1)
    predicted, cached = placements.predicted[once], log.cached_tokens[once]
    error = float(np.abs(predicted - cached).sum()) / max(int(log.prompt_tokens[once].sum()), 1)
    return Prediction(int(predicted.sum()), int(cached.sum()), error)
