"""Which settings may change while the core runs. What sizes a pool or changes what a cached page means may not."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

from services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig

Tunable = int | float | str | bool

NAMES = (
    "schedule_policy",
    "lpm_fallback_threshold",
    "priority_preemption_threshold",
    "schedule_conservativeness",
    "max_running_requests",
    "max_queued_requests",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "adaptive_chunk_rows",
    "adaptive_chunk_s",
    "max_extend_steps",
    "prefill_max_requests",
    "max_prompt_logprob_tokens",
    "enable_mixed_chunk",
    "waiting_timeout_s",
    "running_timeout_s",
    "session_capacity",
    "session_ttl_s",
    "max_sessions",
    "retract_interval",
)


def tunables(config: SchedulerConfig) -> dict[str, Tunable]:
    return {name: _plain(getattr(config, name)) for name in NAMES}


def retuned(config: SchedulerConfig, changes: Mapping[str, Tunable], num_slots: int) -> SchedulerConfig:
    """config with the changes. Raises ValueError naming the field that is unknown, of the wrong type or out of range."""
    values = {name: _checked(config, name, value) for name, value in changes.items()}
    if config.whole_prompts and (cutting := {"chunked_prefill_size", "enable_mixed_chunk", "max_prefill_tokens"} & set(values)):
        raise ValueError(f"{min(cutting)}: this model needs each prompt whole, in one step")
    limit = values.get("max_running_requests", 1)
    if not 1 <= int(limit) <= num_slots:
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
    if name not in NAMES:
        raise ValueError(f"{name}: cannot be changed while the worker runs; these can: {', '.join(NAMES)}")
    old = getattr(config, name)
    if isinstance(old, enum.Enum):
        try:
            return str(type(old)(value))
        except ValueError:
            raise ValueError(f"{name}: must be one of {', '.join(str(member.value) for member in type(old))}")
    if isinstance(old, bool) != isinstance(value, bool) or isinstance(value, str):
        raise ValueError(f"{name}: must be a {type(old).__name__}")
    number = value if isinstance(old, bool) else type(old)(value)
    if not isinstance(number, bool) and (number != value or not 0 <= number < math.inf):
        raise ValueError(f"{name}: must be a {type(old).__name__} of 0 or more")
    return number
