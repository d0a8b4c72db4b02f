"""What a fleet is made of, and how long word takes within it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from services.gateway.routing.config import RoutingConfig
from services.sim.core.run.peer_reads import Wire
from services.sim.core.run.worker import HostTimes
from services.worker.core.contracts.config import SchedulerConfig
from services.worker.exec.fake import TimeModel

MIN_TOKENS = 512  # the gateway's --disaggregation-min-tokens


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that is gone at `at` and comes back empty `back_after_s` later; 0: never. Times in seconds."""

    worker: int
    at: float
    back_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Roles:
    """The first workers of a fleet compute prompts for the others, which read their KV (docs/design/prefill-and-decode.md).

    wire: from any worker to any other. min_tokens: of a prompt that its decode worker has not cached, from which it goes
    through a prefill worker.
    """

    prefill_workers: int
    wire: Wire
    kv_bytes_per_token: int
    min_tokens: int = MIN_TOKENS

    def __post_init__(self) -> None:
        if self.prefill_workers < 1 or self.kv_bytes_per_token < 1 or self.min_tokens < 1:
            raise ValueError("with roles there are prefill workers, KV has bytes, and prompts have tokens")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Times in seconds. scheduler: of each worker.

    slack: requests that a worker may have open beyond those that it runs at once, before more wait at the gateway, as a share
    of these.
    hop_s: from a gateway to a worker, and back. report_s: between a worker's load reports, and between its batches for the
    prefix index; index_delay_s: from such a batch to the gateways' indexes. speculative_s: how long a gateway takes a prompt
    for cached where it has sent it. detect_s: from a worker's death until gateways know.
    roles: None: every worker computes whole answers.
    """

    scheduler: SchedulerConfig
    time_model: TimeModel
    routing: RoutingConfig
    workers: int = 8
    gateways: int = 2
    host: HostTimes = field(default_factory=HostTimes)
    overlap: bool = True
    slack: float = 0.25
    hop_s: float = 0.0005
    report_s: float = 0.1
    index_delay_s: float = 0.2
    speculative_s: float = 30.0
    detect_s: float = 0.05
    kills: tuple[Kill, ...] = ()
    seed: int = 0
    roles: Roles | None = None

    def __post_init__(self) -> None:
        if self.prefill_workers and self.prefill_workers >= self.workers:
            raise ValueError("beside prefill workers a fleet has at least one other")
        if self.workers < 1 or self.gateways < 1:
            raise ValueError("a fleet has at least one worker and one gateway")
        if self.slack < 0 or min(self.hop_s, self.index_delay_s, self.speculative_s, self.detect_s) < 0 or not self.report_s > 0:
            raise ValueError("slack and times are not negative, and the time between reports is above 0")
        if self.detect_s < self.hop_s:
            raise ValueError("a worker's death is not known before what it said last")
        for kill in self.kills:
            if not 0 <= kill.worker < self.workers or not kill.at >= 0 or not kill.back_after_s >= 0:
                raise ValueError(f"worker {kill.worker} at {kill.at} s: no such worker or time")
            if 0 < kill.back_after_s <= self.detect_s + self.hop_s:
                raise ValueError("a worker comes back after its death is known")

    @property
    def prefill_workers(self) -> int:
        return 0 if self.roles is None else self.roles.prefill_workers

    def scheduler_of(self, row: int) -> SchedulerConfig:
        """Of the worker of that number."""
        if self.roles is None or row < self.roles.prefill_workers:
            return self.scheduler
        page_bytes = self.roles.kv_bytes_per_token * self.scheduler.page_size
        return replace(self.scheduler, reads_peers=True, page_bytes=page_bytes)

    @property
    def limit(self) -> int:
        """Requests that a worker may have open."""
        running = self.scheduler.max_running_requests
        return running + max(2, round(running * self.slack))
