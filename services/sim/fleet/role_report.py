"""What prefill and decode workers did, and how a fleet of them compares with as many workers that do both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.sim.core.report.report import Quantiles
from services.sim.fleet.config import Roles
from services.sim.fleet.simulation import FleetOutcome
from services.sim.fleet.worker import WorkerTally


@dataclass(frozen=True, slots=True)
class RoleReport:
    """prefill_busy, decode_busy: share of the time in which their devices ran steps. handed_over: requests that were, at least
    once. kept_bytes: of KV that was kept for readers. read_bytes: of these, that were read; the rest was cached there, or
    computed. ahead_bytes: of what was read, before the request came that it was read for. refused_reads: that brought nothing.
    gap: from the token with which a request is handed over to its next."""

    prefill_busy: float
    decode_busy: float
    handed_over: int
    kept_bytes: int
    read_bytes: int
    ahead_bytes: int
    refused_reads: int
    gap: Quantiles


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
