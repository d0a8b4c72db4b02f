"""Fleets' figures as Markdown: one row per run, and with roles what these make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.sim.core.report.report import Quantiles
from services.sim.fleet.report import FleetReport

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
    """One row per run, and below it what the decisions were."""
    table = _markdown([FLEET_HEADS, *(_fleet_row(report) for report in reports.values())])
    return "\n".join([table, "", *(_decisions(report) for report in reports.values())])


def as_role_table(pairs: Sequence[tuple[FleetReport, FleetReport]]) -> str:
    """pairs: (with roles, without), of the same trace and policy. What comes with roles, as a share of what comes without, is
    a second table."""
    rows = [_role_row(report) for pair in pairs for report in pair]
    ratios = [
        (with_roles.policy, *(_ratio(figure, with_roles, both) for figure in RATIOS.values())) for with_roles, both in pairs
    ]
    return "\n\n".join([_markdown([ROLE_HEADS, *rows]), _markdown([("with / without roles", *RATIOS), *ratios])])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the heads."""
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
