"""Describes a simulated fleet and the delays within it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rootstock_llm.services.gateway.routing.config import RoutingConfig
from rootstock_llm.services.sim.core.run.remote_reads import Wire
from rootstock_llm.services.sim.core.run.worker import HostTimes
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.exec.fake import TimeModel

MIN_TOKENS = 512  # default of the gateway's --disaggregation-min-tokens


@dataclass(frozen=True, slots=True)
class Kill:
    """The death of a worker. Times are in seconds."""

    worker: int  # index of the worker in the fleet, from 0
    at: float  # virtual time of its death
    back_after_s: float = 0.0  # seconds from the death to the restart, which loses all KV; 0: no restart


@dataclass(frozen=True, slots=True)
class Roles:
    """Prefill and decode workers: the first workers compute prompts, and the others read their KV and decode.

    See docs/design/prefill-and-decode.md.
    """

    prefill_workers: int  # number of prefill workers
    wire: Wire  # connection between any two workers
    kv_bytes_per_token: int  # bytes of KV per token over all layers
    min_tokens: int = MIN_TOKENS  # smallest number of uncached prompt tokens for which a prefill worker is used

    def __post_init__(self) -> None:
        if self.prefill_workers < 1 or self.kv_bytes_per_token < 1 or self.min_tokens < 1:
            raise ValueError("prefill_workers, kv_bytes_per_token and min_tokens must be at least 1")


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Configuration of a fleet. Times are in seconds."""

    scheduler: SchedulerConfig  # configuration of each worker's scheduler
    time_model: TimeModel
    routing: RoutingConfig
    workers: int = 8
    gateways: int = 2
    host: HostTimes = field(default_factory=HostTimes)
    overlap: bool = True
    # Requests that a worker accepts beyond max_running_requests, as a share of that number. Gateways queue further requests.
    slack: float = 0.25
    hop_s: float = 0.0005  # time of a message from a gateway to a worker, or from a worker to a gateway
    report_s: float = 0.1  # time between a worker's load reports, and between its event batches for the prefix index
    index_delay_s: float = 0.2  # time from an event batch to its arrival in the gateways' indexes
    speculative_s: float = 30.0  # time for which a gateway assumes that a worker has cached a prompt sent to it
    detect_s: float = 0.05  # time from a worker's death until gateways notice it
    kills: tuple[Kill, ...] = ()
    seed: int = 0
    roles: Roles | None = None  # None: every worker both computes prompts and decodes

    def __post_init__(self) -> None:
        if self.prefill_workers and self.prefill_workers >= self.workers:
            raise ValueError("a fleet with prefill workers needs at least one other worker")
        if self.workers < 1 or self.gateways < 1:
            raise ValueError("a fleet needs at least one worker and one gateway")
        numbers = (self.slack, self.hop_s, self.index_delay_s, self.speculative_s, self.detect_s)
        if not all(number >= 0 for number in numbers) or not self.report_s > 0:
            raise ValueError("slack and times must not be negative, and report_s must be above 0")
        if self.detect_s < self.hop_s:
            raise ValueError(
                f"detect_s {self.detect_s} must be at least hop_s {self.hop_s}, so that a dead worker's last output arrives first"
            )
        for kill in self.kills:
            if not 0 <= kill.worker < self.workers or not kill.at >= 0 or not kill.back_after_s >= 0:
                raise ValueError(
                    f"cannot kill worker {kill.worker} at {kill.at} s: the worker does not exist, or a time is negative"
                )
            if 0 < kill.back_after_s <= self.detect_s + self.hop_s:
                raise ValueError(
                    f"worker {kill.worker} must restart after gateways notice its death: more than detect_s + hop_s later"
                )

    @property
    def prefill_workers(self) -> int:
        return 0 if self.roles is None else self.roles.prefill_workers

    def scheduler_of(self, row: int) -> SchedulerConfig:
        """Returns the scheduler configuration of the worker with the index `row` in the fleet."""
        if self.roles is None or row < self.roles.prefill_workers:
            return self.scheduler
        page_bytes = self.roles.kv_bytes_per_token * self.scheduler.page_size
        return replace(self.scheduler, reads_peers=True, page_bytes=page_bytes)

    @property
    def limit(self) -> int:
        """Largest number of open requests of a worker."""
        running = self.scheduler.max_running_requests
        return running + max(2, round(running * self.slack))
