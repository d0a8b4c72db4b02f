"""Computes the figures of a fleet's run and prints them as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.report.report import Quantiles
from rootstock_llm.services.sim.fleet.config import Roles
from rootstock_llm.services.sim.fleet.simulation import FleetOutcome
from rootstock_llm.services.sim.fleet.worker import WorkerTally


@dataclass(frozen=True, slots=True)
class RoleReport:
    """Figures of prefill and decode workers."""

    prefill_busy: float  # share of the time in which the prefill workers' devices ran steps
    decode_busy: float  # share of the time in which the decode workers' devices ran steps
    handed_over: int  # requests that were handed over at least once
    kept_bytes: int  # bytes of KV that prefill workers reserved for decode workers
    read_bytes: int  # reserved bytes that were read; decode workers had the others cached or computed them
    ahead_bytes: int  # reserved bytes that were read before the request arrived
    refused_reads: int  # reads that returned no pages
    gap: Quantiles  # seconds between the token at which a request was handed over and the request's next token


def role_report(outcome: FleetOutcome, roles: Roles) -> RoleReport:
    handovers, first, seconds = outcome.log.handovers, roles.prefill_workers, max(outcome.seconds, 1e-9)
    return RoleReport(
        prefill_busy=_busy(outcome.tallies[:first], seconds),
        decode_busy=_busy(outcome.tallies[first:], seconds),
        handed_over=int((handovers.count > 0).sum()),
        kept_bytes=handovers.pages * outcome.config.scheduler.page_size * roles.kv_bytes_per_token,
        read_bytes=sum(tally.read_bytes for tally in outcome.tallies),
        ahead_bytes=sum(tally.ahead_bytes for tally in outcome.tallies),
        refused_reads=sum(tally.refused_reads for tally in outcome.tallies),
        gap=Quantiles.of(handovers.gaps()),
    )


def _busy(tallies: Sequence[WorkerTally], seconds: float) -> float:
    return sum(tally.busy_s for tally in tallies) / (len(tallies) * seconds)


F64 = NDArray[np.float64]
MIN_MEAN_OPEN = 4.0  # mean open requests per worker below which a window is ignored


@dataclass(frozen=True, slots=True)
class Balance:
    """The busiest worker's load divided by the mean load: 1 if all loads are equal. With roles, only decode workers count."""

    tokens: float  # prompt and output tokens of the requests that a worker served
    # Open requests, over the time in which requests were sent; over the whole run if all were sent at once; 0 if the run was too
    # short for a sample.
    open: float
    worst_open: float  # as `open`, in the window with the largest value


@dataclass(frozen=True, slots=True)
class Prediction:
    """The gateways' predictions of cached tokens, for requests that were sent once."""

    predicted_tokens: int  # prompt tokens that gateways expected to be cached
    cached_tokens: int  # prompt tokens that were cached
    mean_error: float  # mean absolute difference per request, divided by the mean prompt length


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The figures of one run. Times are in seconds of virtual time, except wall_s."""

    policy: str
    requests: int
    finished: int
    errors: dict[str, int]
    seconds: float
    hit_rate: float  # cached prompt tokens divided by prompt tokens, of finished requests
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft: Quantiles  # time from arrival at the gateway to the first token, for finished requests
    e2e: Quantiles  # time from arrival at the gateway to the end, for finished requests
    itl: Quantiles  # time between two messages of a request
    busy: float  # share of the time in which devices ran steps
    balance: Balance
    prediction: Prediction
    reasons: dict[str, int]  # placements by routing reason
    resumed: int  # requests that were sent more than once, not counting handovers
    max_queue: int  # longest queue of one gateway
    steps: int  # steps of all workers
    wall_s: float
    roles: RoleReport | None = None  # figures of prefill and decode workers; None in a fleet without roles


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
    """Returns the largest ratio, over all windows, of the busiest worker's open requests to the mean over workers.

    Windows with fewer than MIN_MEAN_OPEN open requests per worker are ignored. The result is 0 if all windows are ignored.

    Args:
        opened: float64[samples, workers], open requests.
        samples_per_window: length of a window. If there are fewer samples, they are one window.
    """
    size = min(samples_per_window, len(opened))
    windows = [opened[at : at + size].mean(axis=0) for at in range(0, len(opened) - size + 1, size)]
    return max((_max_to_mean(window) for window in windows if window.mean() >= MIN_MEAN_OPEN), default=0.0)


def _sends(outcome: FleetOutcome) -> NDArray[np.int64]:
    """Returns int64[requests], the number of times that each request was sent, not counting handovers."""
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


FLEET_HEADS = (
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
ROLE_HEADS = (
    "run",
    "requests/s",
    "ITL p50 / p99, ms",
    "busy",
    "handed over",
    "gap p50 / p99, ms",
    "ahead / read / kept, GB",
    "refused reads",
)
RATIOS: dict[str, Callable[[FleetReport], float]] = {
    "TTFT p50": lambda report: report.ttft.p50,
    "TTFT p99": lambda report: report.ttft.p99,
    "ITL p50": lambda report: report.itl.p50,
    "ITL p99": lambda report: report.itl.p99,
    "E2E p50": lambda report: report.e2e.p50,
    "requests/s": lambda report: report.requests_per_s,
}


def as_table(reports: Mapping[str, FleetReport]) -> str:
    """Returns a table with one row per run, and below it the routing decisions."""
    table = _markdown([FLEET_HEADS, *(_fleet_row(report) for report in reports.values())])
    return "\n".join([table, "", *(_decisions(report) for report in reports.values())])


def as_role_table(pairs: Sequence[tuple[FleetReport, FleetReport]]) -> str:
    """Returns a table of runs with and without roles, and a table of their ratios.

    Args:
        pairs: reports (with roles, without roles) of the same trace and policy.
    """
    rows = [_role_row(report) for pair in pairs for report in pair]
    ratios = [
        (with_roles.policy, *(_ratio(figure, with_roles, both) for figure in RATIOS.values())) for with_roles, both in pairs
    ]
    return "\n\n".join([_markdown([ROLE_HEADS, *rows]), _markdown([("with / without roles", *RATIOS), *ratios])])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. The first row has the column titles."""
    heads = rows[0]
    rows = [heads, tuple("---" for _ in heads), *rows[1:]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows)


def _role_row(report: FleetReport) -> tuple[str, ...]:
    figures = (report.policy, f"{report.requests_per_s:.2f}", _ms(report.itl))
    roles = report.roles
    if roles is None:
        return (*figures, f"{report.busy:.0%}", "", "", "", "")
    return (
        *figures,
        f"prefill {roles.prefill_busy:.0%}, decode {roles.decode_busy:.0%}",
        f"{roles.handed_over:,}",
        _ms(roles.gap),
        f"{roles.ahead_bytes / 1e9:.1f} / {roles.read_bytes / 1e9:.1f} / {roles.kept_bytes / 1e9:.1f}",
        f"{roles.refused_reads:,}",
    )


def _ms(values: Quantiles) -> str:
    return f"{values.p50 * 1e3:.1f} / {values.p99 * 1e3:.1f}"


def _ratio(figure: Callable[[FleetReport], float], with_roles: FleetReport, both: FleetReport) -> str:
    return f"{figure(with_roles) / figure(both):.2f}" if figure(both) else "-"


def _fleet_row(report: FleetReport) -> tuple[str, ...]:
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
