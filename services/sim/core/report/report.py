"""Computes the figures of a simulation and prints them as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.run.logs import RequestLog, StepLog
from rootstock_llm.services.sim.core.run.simulation import Outcome
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.plan import ForwardMode

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: F64) -> Quantiles:
        """Returns the quantiles of the values, or 0 for each if the array is empty."""
        if not len(values):
            return cls(0.0, 0.0, 0.0)
        return cls(*(float(value) for value in np.percentile(values, [50, 90, 99])))


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run. Times are in seconds of virtual time, except wall_s."""

    requests: int
    finished: int  # requests that ended without an error
    errors: dict[str, int]  # number of requests by error
    seconds: float  # from the first sent request to the end of the run
    prompt_tokens: int  # tokens of finished requests, like the next two fields
    cached_tokens: int
    output_tokens: int
    hit_rate: float  # cached prompt tokens divided by prompt tokens, of finished requests
    output_tokens_per_s: float
    total_tokens_per_s: float
    grammar_tokens_per_s: float  # as output_tokens_per_s, for requests with a grammar only
    grammar_tpot: Quantiles  # as tpot, for requests with a grammar only
    requests_per_s: float
    ttft: Quantiles  # time from sending to the first token
    tpot: Quantiles  # time from the first to the last token, per token after the first; for requests with two tokens or more
    itl: Quantiles  # time between two messages of a request, for requests without a grammar
    e2e: Quantiles  # time from sending to the end of the request
    queue: Quantiles  # time from arrival at the scheduler to the first admission
    steps: dict[str, int]  # number of steps by ForwardMode
    mean_batch: float  # mean number of rows per step
    max_batch: int  # largest number of rows of a step
    mean_running: float  # mean number of running requests over time
    mean_queue: float  # mean number of waiting requests over time
    max_queue: int  # largest number of waiting requests
    mean_kv: float  # mean share of the pool's pages that running requests use, over time
    max_kv: float  # largest share of the pool's pages that running requests use
    device_busy: float  # share of the time in which the device ran steps
    counters: dict[str, int]  # all counters of StepStats, without the suffix _total
    wall_s: float
    requests_per_wall_s: float


def make_report(outcome: Outcome, wall_s: float) -> Report:
    log, steps = outcome.requests, outcome.steps
    done = log.finished
    prompt, cached = int(log.prompt_tokens[done].sum()), int(log.cached_tokens[done].sum())
    output = int(log.output_tokens[done].sum())
    seconds = max(outcome.seconds - float(np.nanmin(log.sent)), 1e-9)
    rows, waiting = steps.column("rows"), steps.gauge("waiting")
    kv = steps.gauge("pages_in_use") / outcome.num_pages
    return Report(
        requests=len(done),
        finished=int(done.sum()),
        errors=log.errors(),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        hit_rate=cached / max(prompt, 1),
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        grammar_tokens_per_s=int(log.output_tokens[done & log.constrained].sum()) / seconds,
        grammar_tpot=_tpot(log, log.constrained),
        requests_per_s=float(done.sum()) / seconds,
        ttft=Quantiles.of((log.first_token - log.sent)[done & (log.output_tokens > 0)]),
        tpot=_tpot(log, log.finished),
        itl=Quantiles.of(log.gaps()),
        e2e=Quantiles.of((log.ended - log.sent)[done]),
        queue=Quantiles.of(log.queue[done]),
        steps=_steps_by_mode(steps),
        mean_batch=float(rows.mean()) if len(steps) else 0.0,
        max_batch=int(rows.max(initial=0)),
        mean_running=_over_time(steps, steps.gauge("running")),
        mean_queue=_over_time(steps, waiting),
        max_queue=int(waiting.max(initial=0)),
        mean_kv=_over_time(steps, kv),
        max_kv=float(kv.max(initial=0.0)),
        device_busy=float((steps.column("end") - steps.column("begin")).sum()) / seconds,
        counters=_counters(outcome.stats),
        wall_s=wall_s,
        requests_per_wall_s=len(done) / max(wall_s, 1e-9),
    )


def as_dict(report: Report) -> dict[str, object]:
    return asdict(report)


def as_table(report: Report) -> str:
    """Returns a Markdown table of two columns."""
    rows = [
        ("requests", _requests(report)),
        ("virtual time", f"{report.seconds:,.1f} s"),
        ("prompt tokens", f"{report.prompt_tokens:,}, of which cached {report.cached_tokens:,}"),
        ("hit rate", f"{report.hit_rate:.1%}"),
        ("output tokens", f"{report.output_tokens:,}"),
        ("throughput, output", f"{report.output_tokens_per_s:,.0f} tok/s"),
        ("throughput, all tokens", f"{report.total_tokens_per_s:,.0f} tok/s, {report.requests_per_s:,.1f} requests/s"),
        ("", "p50 / p90 / p99"),
        ("TTFT", _milliseconds(report.ttft)),
        ("TPOT", _milliseconds(report.tpot)),
        ("ITL", _milliseconds(report.itl)),
        ("E2E", _milliseconds(report.e2e)),
        ("queue", _milliseconds(report.queue)),
        *(_grammar_rows(report) if report.grammar_tokens_per_s else ()),
        ("", "mean / max"),
        ("batch", f"{report.mean_batch:.1f} / {report.max_batch} rows"),
        ("waiting", f"{report.mean_queue:.1f} / {report.max_queue}"),
        ("KV in use", f"{report.mean_kv:.1%} / {report.max_kv:.1%}"),
        ("running, mean", f"{report.mean_running:.1f}"),
        ("steps", ", ".join(f"{name} {count:,}" for name, count in report.steps.items()) or "none"),
        ("device busy", f"{report.device_busy:.1%}"),
        *((name.replace("_", " "), f"{count:,}") for name, count in report.counters.items() if name not in _SHOWN_ABOVE),
        ("wall time", f"{report.wall_s:.1f} s, {report.requests_per_wall_s:,.0f} requests/s"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"| {name.ljust(width)} | {value} |" for name, value in rows]
    return "\n".join([f"| {'what'.ljust(width)} | value |", f"| {'-' * width} | --- |", *lines])


_SHOWN_ABOVE = ("prompt_tokens", "cached_tokens", "generated_tokens", "requests")


def _requests(report: Report) -> str:
    ends = [f"{report.finished:,} finished", *(f"{count:,} {name}" for name, count in report.errors.items())]
    return f"{report.requests:,}: {', '.join(ends)}"


def _grammar_rows(report: Report) -> list[tuple[str, str]]:
    throughput = ("with a grammar, output", f"{report.grammar_tokens_per_s:,.0f} tok/s")
    return [throughput, ("with a grammar, TPOT", _milliseconds(report.grammar_tpot))]


def _milliseconds(quantiles: Quantiles) -> str:
    values = " / ".join(f"{value * 1e3:,.1f}" for value in (quantiles.p50, quantiles.p90, quantiles.p99))
    return f"{values} ms"


def _tpot(log: RequestLog, selected: NDArray[np.bool_]) -> Quantiles:
    some = log.finished & selected & (log.output_tokens > 1)
    return Quantiles.of((log.ended - log.first_token)[some] / (log.output_tokens[some] - 1))


def _steps_by_mode(steps: StepLog) -> dict[str, int]:
    modes, counts = np.unique(steps.column("mode"), return_counts=True)
    return {ForwardMode(int(m)).name.lower(): count for m, count in zip(modes.tolist(), counts.tolist(), strict=True)}


def _over_time(steps: StepLog, values: F64) -> float:
    """Returns the mean over time of a gauge. Each value lasts until the next sample."""
    if len(values) < 2:
        return float(values.mean()) if len(values) else 0.0
    lasted = np.diff(steps.gauge("at"))
    total = float(lasted.sum())
    return float((values[:-1] * lasted).sum()) / total if total > 0 else float(values.mean())


def _counters(stats: StepStats) -> dict[str, int]:
    names = [field.name for field in fields(stats) if field.name.endswith("_total")]
    return {name.removesuffix("_total"): getattr(stats, name) for name in names}
