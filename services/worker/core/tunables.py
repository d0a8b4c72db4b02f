"""Names the settings that may change while the core runs, with their ranges.

A setting is not among them if it sizes a pool or changes the meaning of a cached page.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.core.contracts.config import UNCHUNKED, SchedulePolicy, SchedulerConfig

Tunable = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers. Infinity and NaN are in no range."""

    least: float = 0
    above: bool = False  # least itself is outside
    most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and not (self.above and number == self.least) and number < math.inf

    def __str__(self) -> str:
        least = f"above {self.least:g}" if self.above else f"{self.least:g} or more"
        return least if self.most == math.inf else f"{least}, up to {self.most:g}"


_KINDS: Mapping[type, str] = {bool: "true or false", int: "an integer", float: "a number"}

COUNT = Range()
POSITIVE = Range(above=True)

# By name, with the numbers' ranges: those of the worker's settings of these names. None: no number.
RANGES: Mapping[str, Range | None] = {
    "schedule_policy": None,
    "lpm_fallback_threshold": COUNT,
    "priority_preemption_threshold": COUNT,
    "schedule_conservativeness": POSITIVE,
    "max_running_requests": Range(1),  # up to the number that the worker started with
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


def tunables(config: SchedulerConfig) -> dict[str, Tunable]:
    return {name: _plain(getattr(config, name)) for name in RANGES}


def retuned(config: SchedulerConfig, changes: Mapping[str, Tunable], num_slots: int) -> SchedulerConfig:
    """config with the changes. Raises ValueError naming the field that is unknown, of the wrong type or out of range."""
    values = {name: _checked(config, name, value) for name, value in changes.items()}
    if config.whole_prompts and (cutting := {"chunked_prefill_size", "enable_mixed_chunk", "max_prefill_tokens"} & set(values)):
        raise ValueError(f"{min(cutting)}: this model needs each prompt whole, in one step")
    if values.get("chunked_prefill_size") == UNCHUNKED:
        values["chunked_prefill_size"] = 0
    if int(values.get("max_running_requests", 1)) > num_slots:
        raise ValueError(f"max_running_requests: must be within 1 and {num_slots}, the number it started with")
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
        raise ValueError(f"{name}: cannot be changed while the worker runs; these can: {', '.join(RANGES)}")
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
