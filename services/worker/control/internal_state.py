"""Reads and changes the state of a running scheduler for operators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rootstock_llm.services.shared.control_values import Scalar
from rootstock_llm.services.worker.control.occupation import MemoryControl, MemoryPart
from rootstock_llm.services.worker.control.profiles import Profiles
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.loop.inbox import Pace

MAX_STEP_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class InternalState:
    """A copy of the scheduler's state at one time. Later changes do not affect it."""

    tunables: Mapping[str, Scalar]  # the settings that SetInternalState can change, by name
    stats: Mapping[str, Scalar]  # the scalar fields of StepStats
    paused: bool
    step_delay_s: float  # smallest time in seconds between the launches of two steps; 0: no delay
    released: tuple[MemoryPart, ...]  # parts of the worker's memory that are released to the system
    profile: Path | None  # file of the running profile; None if no profile is running


def snapshot(control: SchedulerControl, pace: Pace, memory_control: MemoryControl, profiles: Profiles) -> InternalState:
    """Returns a copy of the present state. Must run on the scheduler loop's thread; any thread may use the result."""
    figures = dataclasses.asdict(control.stats())
    return InternalState(
        tunables=dict(control.tunables()),
        stats={name: value for name, value in figures.items() if isinstance(value, (bool, int, float, str))},
        paused=control.paused,
        step_delay_s=pace.step_delay_s,
        released=memory_control.released,
        profile=profiles.running,
    )


def retune(control: SchedulerControl, changes: Mapping[str, Scalar]) -> None:
    """Changes tunables of the scheduler. If a change is invalid, no tunable changes.

    Args:
        control: the scheduler's control.
        changes: new values by tunable.

    Raises:
        ValueError: a tunable is unknown or its value is invalid. The message begins with the tunable's name.
    """
    known = control.tunables()
    control.retune({name: _fitted(name, value, known) for name, value in changes.items()})


def _fitted(name: str, value: Scalar, known: Mapping[str, Scalar]) -> Scalar:
    """Returns the value in the tunable's type. Raises ValueError if the value does not fit the type.

    An int is accepted for a float, because clients write 1 instead of 1.0.
    """
    if name not in known:
        raise ValueError(f"{name}: no such tunable. The tunables are {', '.join(sorted(known))}")
    wanted = type(known[name])
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{name}: must be a {wanted.__name__}, not a {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: must be finite")
    return value


def slow_down(pace: Pace, step_delay_s: float) -> None:
    """Sets the smallest time between two step launches. Raises ValueError if it is not between 0 and MAX_STEP_DELAY_S."""
    if not 0 <= step_delay_s <= MAX_STEP_DELAY_S:  # false for NaN
        raise ValueError(f"step_delay_s: must be 0 to {MAX_STEP_DELAY_S:g} seconds")
    pace.step_delay_s = step_delay_s
