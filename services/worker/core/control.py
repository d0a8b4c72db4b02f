"""The operators' calls on the scheduler, and the settings that may change at run time.

Settings that size a pool, and settings on which cached pages depend, may not change.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.config import UNCHUNKED, SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.experts import ExpertDistribution
from rootstock_llm.services.worker.core.contracts.messages import PauseMode, TraceEvent
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.core.invariants import violations
from rootstock_llm.services.worker.core.kv.radix_cache import is_retired, retired_name, salt_of_tree
from rootstock_llm.services.worker.core.requests.finish import CANCELLED
from rootstock_llm.services.worker.core.scheduler import Scheduler

Tunable = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers. Infinity and NaN are in no range."""

    least: float = 0
    above: bool = False  # whether numbers must be above `least`; otherwise they may equal it
    most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and not (self.above and number == self.least) and number < math.inf

    def __str__(self) -> str:
        least = f"above {self.least:g}" if self.above else f"{self.least:g} or more"
        return least if self.most == math.inf else f"{least}, up to {self.most:g}"


_KINDS: Mapping[type, str] = {bool: "true or false", int: "an integer", float: "a number"}


COUNT = Range()
POSITIVE = Range(above=True)

# The settings that may change, each with its range. None: the values are not numbers. The worker's flags of the same names have
# the same ranges, except that the flag max_running_requests may be 0.
RANGES: Mapping[str, Range | None] = {
    "schedule_policy": None,
    "lpm_fallback_threshold": COUNT,
    "priority_preemption_threshold": COUNT,
    "schedule_conservativeness": POSITIVE,
    "max_running_requests": Range(1),  # _retuned() also checks that it is at most the value at the worker's start
    "max_queued_requests": COUNT,
    "max_prefill_tokens": Range(1),
    "chunked_prefill_size": Range(UNCHUNKED),
    "adaptive_chunk_rows": COUNT,
    "adaptive_chunk_s": Range(most=3600),
    "max_extend_steps": COUNT,
    "prefill_max_requests": COUNT,
    "max_prompt_logprob_tokens": Range(256),
    "enable_mixed_chunk": None,
    "waiting_timeout_s": COUNT,
    "running_timeout_s": COUNT,
    "session_capacity": Range(1),
    "session_ttl_s": POSITIVE,
    "max_sessions": COUNT,
    "retract_interval": COUNT,
}


class SchedulerControl:
    """The operators' calls on one scheduler: pause, retune, flush, replace weights, count experts, check and trace.

    The loop's thread makes these calls between two calls of the scheduler. The object has no state of its own.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def paused(self) -> bool:
        return self._scheduler.paused

    @property
    def revision(self) -> str:
        """Revision of the weights with which steps are computed; empty if the weights have no revision."""
        return self._scheduler.revision

    def stats(self) -> StepStats:
        return self._scheduler.stats()

    def close(self, reason: str) -> None:
        """Refuses new requests until reopen(). `reason` is the message to their clients."""
        self._scheduler.closed = reason

    def reopen(self) -> None:
        """Accepts new requests again."""
        self._scheduler.closed = ""

    def pause(self, mode: PauseMode, now: float) -> None:
        """Stops planning steps until resume(). The caller still commits the step in flight."""
        scheduler = self._scheduler
        scheduler.paused = True
        if mode is PauseMode.ABORT:
            for request in list(scheduler.queues.by_key.values()):
                scheduler.lifecycle.end(request, CANCELLED, now)
        elif mode is PauseMode.RETRACT:
            for request in [*scheduler.queues.decoding, *scheduler.queues.extending]:
                scheduler.lifecycle.retract(request, scheduler.flight_step, -1)

    def resume(self) -> None:
        self._scheduler.paused = False

    def flush_cache(self) -> int:
        """Evicts every unlocked page of the prefix cache.

        Before that, all KV reservations end, and the results of running operations on device pages are discarded.

        Returns:
            The number of evicted pages.
        """
        scheduler = self._scheduler
        scheduler.reservations.end_all()
        if scheduler.tiers is not None:
            scheduler.tiers.end_all()
        num_pages = scheduler.memory.flush()
        if scheduler.events is not None:
            scheduler.events.flushed()
        return num_pages

    def flush_tiers(self, tiers: Sequence[Tier]) -> int:
        """Forgets the pages of the given tiers below the device. Returns the number of forgotten pages."""
        return 0 if self._scheduler.tiers is None else self._scheduler.tiers.clear(tiers)

    def forget_salt(self, salt: str, tiers: Sequence[Tier]) -> int:
        """Forgets the pages of one cache salt in the given tiers.

        Requests that use such pages on the device continue to use them until they end. No later request finds these pages, and
        they are not copied to another tier.

        Args:
            salt: the cache salt; empty for pages without a salt.
            tiers: the tiers whose pages are forgotten.

        Returns:
            The number of freed device pages and forgotten host pages. Device pages in use are not counted.
        """
        scheduler, pages = self._scheduler, 0
        if Tier.DEVICE in tiers:
            scheduler.num_retirements += 1
            pages += self._retire(salt, scheduler.num_retirements)
        return pages if scheduler.tiers is None else pages + scheduler.tiers.forget_salt(salt, tiers)

    def _retire(self, salt: str, number: int) -> int:
        """Hides the device pages of a salt from new requests, and frees the unused pages. Returns the number of freed pages."""
        scheduler, tree = self._scheduler, self._scheduler.memory.tree
        requests = [request for request in scheduler.queues.by_key.values() if _has_salt(request.namespace, salt)]
        names = dict.fromkeys(
            [name for name in tree.names() if _has_salt(name, salt)] + [request.namespace for request in requests]
        )
        for name in names:
            tree.retire(name, retired_name(name, number))
        for request in requests:
            request.namespace = retired_name(request.namespace, number)
        if scheduler.tiers is not None:
            scheduler.tiers.retired(names)
        scheduler.reservations.end_retired()
        return scheduler.memory.forget_retired()

    def storage_tag(self, salt: str) -> bytes | None:
        """Returns the tag of a salt's pages in the storage tier, or None if the worker has no tiers below the device."""
        return None if self._scheduler.tiers is None else self._scheduler.tiers.tag(salt)

    def reset_memory(self) -> None:
        """Forgets every device page and every session, because the content of the pool is lost.

        The scheduler must be idle and settled (see Scheduler), and no step may be in flight.
        """
        scheduler = self._scheduler
        assert scheduler.idle and scheduler.settled and scheduler.flight_step < 0, "no request, operation or step uses the memory"
        scheduler.sessions.close_all(scheduler.memory)
        scheduler.reservations.end_all()
        if scheduler.tiers is not None:
            scheduler.tiers.forget_tree()
        scheduler.memory.reset()
        if scheduler.events is not None:
            scheduler.events.cleared()

    def replace_weights(self, revision: str) -> None:
        """Sets the revision of all later steps and forgets the KV of the old weights.

        The conditions of reset_memory() apply.
        """
        self._scheduler.revision = revision
        self.reset_memory()
        if self._scheduler.tiers is not None:
            self._scheduler.tiers.replace_weights(revision)

    def tunables(self) -> dict[str, Tunable]:
        """Returns the present value of every setting that retune() accepts."""
        planner, config = self._scheduler.planner, self._scheduler.config
        running = {"max_running_requests": planner.extends.running_limit, "new_token_ratio": planner.ratio.value}
        return {**{name: _plain(getattr(config, name)) for name in RANGES}, **running}

    def retune(self, changes: Mapping[str, Tunable]) -> None:
        """Changes settings from the next plan on.

        Raises:
            ValueError: a setting is unknown or its value is invalid; the message names the setting. No setting changes then.
        """
        scheduler, planner = self._scheduler, self._scheduler.planner
        changes = dict(changes)
        ratio = changes.pop("new_token_ratio", None)
        if ratio is not None and not 0.0 <= float(ratio) <= 1.0:
            raise ValueError("new_token_ratio: must be between 0 and 1")
        config = _retuned(scheduler.config, changes, len(scheduler.memory.slots.num_pages))
        config = dataclasses.replace(config, max_running_requests=scheduler.config.max_running_requests)
        limit = int(changes.get("max_running_requests", planner.extends.running_limit))
        planner.retune(config, limit, None if ratio is None else float(ratio))
        scheduler.queues.batch_is_full = False
        scheduler.reconfigure(config)

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts whose rows the executor can count."""
        return self._scheduler.expert_record.shape is not None

    @property
    def records_experts(self) -> bool:
        """Whether an expert distribution record runs."""
        return self._scheduler.expert_record.is_running

    def start_expert_record(self) -> None:
        """Begins an expert distribution record. It counts all steps from the next plan on.

        The model must have experts, and no record may run.
        """
        self._scheduler.expert_record.start()

    def stop_expert_record(self) -> None:
        """Ends the expert distribution record. Its counts stay until the next record begins."""
        self._scheduler.expert_record.stop()

    def expert_distribution(self) -> ExpertDistribution | None:
        """Returns the counts of the present or last record, or None if no record was started."""
        return self._scheduler.expert_record.distribution()

    def trace(self, request_id: str) -> list[TraceEvent]:
        """Returns the events of a request that are still in the trace log, oldest first."""
        return self._scheduler.trace.of(request_id)

    def trace_since(self, count: int) -> tuple[int, list[TraceEvent]]:
        """Returns the number of trace events since the start, and the events after the first `count`, oldest first.

        Events that the log no longer has are missing.
        """
        return self._scheduler.trace.since(count)

    def self_check(self) -> list[str]:
        """Returns one sentence per broken invariant; empty if all invariants hold.

        If an invariant is broken and the scheduler is idle and settled, its memory is reset, which closes all sessions.
        """
        scheduler, memory = self._scheduler, self._scheduler.memory
        found = violations(scheduler.queues, memory, scheduler.sessions, scheduler.tiers)
        if scheduler.idle and scheduler.flight_step < 0:
            if memory.num_leased:
                found.append(f"{memory.num_leased} pages are leased although no request runs")
            if found and scheduler.settled:
                self.reset_memory()
        return found


def _retuned(config: SchedulerConfig, changes: Mapping[str, Tunable], num_slots: int) -> SchedulerConfig:
    """Returns the configuration with the changes.

    Raises:
        ValueError: a setting is unknown, has the wrong type or is out of range; the message names the setting.
    """
    values = {name: _checked(config, name, value) for name, value in changes.items()}
    if config.whole_prompts and (cutting := {"chunked_prefill_size", "enable_mixed_chunk", "max_prefill_tokens"} & set(values)):
        raise ValueError(f"{min(cutting)}: this model computes each prompt in one step; no setting may cut prompts")
    if values.get("chunked_prefill_size") == UNCHUNKED:
        values["chunked_prefill_size"] = 0
    if int(values.get("max_running_requests", 1)) > num_slots:
        raise ValueError(f"max_running_requests: must be between 1 and {num_slots}, its value at the worker's start")
    if "schedule_policy" in values:
        values["schedule_policy"] = SchedulePolicy(str(values["schedule_policy"]))
    return dataclasses.replace(config, **values)  # type: ignore[arg-type]


def _plain(value: object) -> Tunable:
    if isinstance(value, enum.Enum):
        return str(value.value)
    assert isinstance(value, int | float | str)
    return value


def _checked(config: SchedulerConfig, name: str, value: Tunable) -> Tunable:
    if name not in RANGES:
        raise ValueError(f"{name}: cannot be changed while the worker runs. These settings can: {', '.join(RANGES)}")
    old = getattr(config, name)
    if isinstance(old, enum.Enum):
        try:
            return str(type(old)(value))
        except ValueError:
            raise ValueError(f"{name}: must be one of {', '.join(str(member.value) for member in type(old))}")
    if isinstance(old, bool) != isinstance(value, bool) or isinstance(value, str):
        raise ValueError(f"{name}: must be {_KINDS[type(old)]}")
    if isinstance(value, bool):
        return value
    allowed = RANGES[name]
    assert allowed is not None, "a number has a range"
    if value not in allowed or type(old)(value) != value:
        raise ValueError(f"{name}: is {value}; must be {_KINDS[type(old)]}, {allowed}")
    return int(value) if isinstance(old, int) else float(value)


def _has_salt(tree: str, salt: str) -> bool:
    return not is_retired(tree) and salt_of_tree(tree) == salt
