"""Statistics of a run, as the text block that the benchmarks of SGLang and vLLM print, and as JSON lines.

TPOT of a request is (E2E - TTFT) / (completion tokens - 1); a request with one token has none. ITL is the time between chunks.
The statistics of ITL are over all pairs of successive chunks of all requests. Failed requests count only in the numbers of
requests and in the send lag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rootstock_llm.services.cli.bench.client import Outcome

WIDTH = 50
STATISTICS = ("Mean", "Median", "P90", "P99")  # the first fields of Distribution, in their order
LATENCIES = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2e", "E2E", "End-to-end Latency"),
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics in milliseconds, with linearly interpolated percentiles. All are 0 if there are no values."""

    mean: float
    median: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution:
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        ms = np.asarray(values, dtype=np.float64) * 1e3
        median, p90, p99 = (float(p) for p in np.percentile(ms, (50, 90, 99)))
        return cls(float(ms.mean()), median, p90, p99, len(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run. Tokens and latencies are those of successful requests. Throughputs are per second of duration_s."""

    successful_requests: int
    failed_requests: int
    unsent_requests: int  # turns that were not sent, because an earlier turn of the conversation had failed
    errors: dict[str, int]  # number of failed requests by error class
    without_usage: int  # successful requests for which the server sent no usage; their chunks are counted as tokens
    duration_s: float  # from the start of the load to the end of the last request
    input_tokens: int
    generated_tokens: int
    cached_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    mean_concurrency: float  # sum of the successful requests' E2E, divided by duration_s
    max_send_lag_ms: float  # longest time from a session's arrival to the sending of its first request, in an open loop
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution


def tpot_s(outcome: Outcome) -> float | None:
    if outcome.ttft_s is None or outcome.completion_tokens < 2:
        return None
    return (outcome.e2e_s - outcome.ttft_s) / (outcome.completion_tokens - 1)


def summarize(outcomes: Sequence[Outcome], planned: int, duration_s: float) -> Summary:
    good = [o for o in outcomes if o.error is None]
    errors = Counter(o.error for o in outcomes if o.error is not None)
    inputs, generated = sum(o.prompt_tokens for o in good), sum(o.completion_tokens for o in good)
    per_second = 1.0 / duration_s if duration_s > 0 else 0.0
    return Summary(
        successful_requests=len(good),
        failed_requests=len(outcomes) - len(good),
        unsent_requests=planned - len(outcomes),
        errors=dict(errors.most_common()),
        without_usage=sum(not o.has_usage for o in good),
        duration_s=duration_s,
        input_tokens=inputs,
        generated_tokens=generated,
        cached_tokens=sum(o.cached_tokens for o in good),
        request_throughput=len(good) * per_second,
        input_throughput=inputs * per_second,
        output_throughput=generated * per_second,
        total_throughput=(inputs + generated) * per_second,
        mean_concurrency=sum(o.e2e_s for o in good) * per_second,
        max_send_lag_ms=max((o.sent_at - o.scheduled_at for o in outcomes), default=0.0) * 1e3,
        ttft_ms=Distribution.of_seconds([o.ttft_s for o in good if o.ttft_s is not None]),
        tpot_ms=Distribution.of_seconds([t for o in good if (t := tpot_s(o)) is not None]),
        itl_ms=Distribution.of_seconds([gap for o in good for gap in o.itl_s]),
        e2e_ms=Distribution.of_seconds([o.e2e_s for o in good]),
    )


def render(summary: Summary, parameters: dict[str, Any]) -> str:
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [row(*pair) for pair in (*load_rows(parameters), *throughput_rows(summary))]
    for key, short, title in LATENCIES:
        lines.append(title.center(WIDTH, "-"))
        values: Distribution = getattr(summary, f"{key}_ms")
        for label, value in zip(STATISTICS, astuple(values)[: len(STATISTICS)], strict=True):
            lines.append(row(f"{label} {short} (ms)", value))
    if summary.errors:
        lines.append("Errors by class".center(WIDTH, "-"))
        lines += [row(error, count) for error, count in summary.errors.items()]
    return "\n".join([*lines, "=" * WIDTH])


def load_rows(parameters: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "Workload", parameters["workload"]
    if parameters["request_rate"] is not None:
        yield "Request rate configured (req/s)", parameters["request_rate"]
    if parameters["concurrency"] is not None:
        yield "Maximum request concurrency", parameters["concurrency"]


def throughput_rows(summary: Summary) -> Iterator[tuple[str, Any]]:
    yield "Successful requests", summary.successful_requests
    yield "Failed requests", summary.failed_requests
    if summary.unsent_requests:
        yield "Requests not sent after a failed turn", summary.unsent_requests
    if summary.without_usage:
        yield "Requests without usage (chunks counted)", summary.without_usage
    yield "Benchmark duration (s)", summary.duration_s
    yield "Total input tokens", summary.input_tokens
    yield "Total generated tokens", summary.generated_tokens
    yield "Total cached tokens", summary.cached_tokens
    yield "Request throughput (req/s)", summary.request_throughput
    yield "Input token throughput (tok/s)", summary.input_throughput
    yield "Output token throughput (tok/s)", summary.output_throughput
    yield "Total token throughput (tok/s)", summary.total_throughput
    yield "Mean concurrency", summary.mean_concurrency
    yield "Max send lag (ms)", summary.max_send_lag_ms


def row(label: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {text:<10}".rstrip()


def request_line(run: str, outcome: Outcome) -> dict[str, Any]:
    """Returns the record of a request, without its text. Times are in ms; `sent_ms` uses one clock for all requests of a run."""
    return {
        "kind": "request",
        "run": run,
        "sent_ms": milliseconds(outcome.sent_at),
        "send_lag_ms": milliseconds(outcome.sent_at - outcome.scheduled_at),
        "ttft_ms": None if outcome.ttft_s is None else milliseconds(outcome.ttft_s),
        "itl_ms": [milliseconds(gap) for gap in outcome.itl_s],
        "e2e_ms": milliseconds(outcome.e2e_s),
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "cached_tokens": outcome.cached_tokens,
        "finish_reason": outcome.finish_reason,
        "error": outcome.error,
        "error_detail": outcome.error_detail,
    }


def summary_line(run: str, parameters: dict[str, Any], machine: dict[str, Any], summary: Summary) -> dict[str, Any]:
    return {"kind": "summary", "run": run, "parameters": parameters, "machine": machine, "results": asdict(summary)}


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def append_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
