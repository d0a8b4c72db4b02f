"""The state of a running scheduler that operators can read and change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rootstock_llm.services.shared.control_values import Scalar
from rootstock_llm.services.worker.control.occupation import MemoryPart, Occupation
from rootstock_llm.services.worker.control.profiles import Profiles
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.loop.inbox import Pace

MAX_STEP_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class InternalState:
    """A copy of the state, which belongs to its receiver."""

    tunables: Mapping[str, Scalar]
    stats: Mapping[str, Scalar]  # the scalar fields of StepStats
    paused: bool
    step_delay_s: float  # see Pace
    released: tuple[MemoryPart, ...]  # parts of the memory that are released
    profile: Path | None  # file of the running profile, if there is one


def snapshot(control: SchedulerControl, pace: Pace, occupation: Occupation, profiles: Profiles) -> InternalState:
    """Copies the present state on the loop's thread. Any thread may use the result."""
    figures = dataclasses.asdict(control.stats())
    return InternalState(
        tunables=dict(control.tunables()),
        stats={name: value for name, value in figures.items() if isinstance(value, (bool, int, float, str))},
        paused=control.paused,
        step_delay_s=pace.step_delay_s,
        released=occupation.released,
        profile=profiles.running,
    )


def retune(control: SchedulerControl, changes: Mapping[str, Scalar]) -> None:
    """Changes tunables. Either all of them change, or no tunable does.

    Raises:
        ValueError: names a tunable that is unknown or cannot have its value.
    """
    known = control.tunables()
    control.retune({name: _fitted(name, value, known) for name, value in changes.items()})


def _fitted(name: str, value: Scalar, known: Mapping[str, Scalar]) -> Scalar:
    """Returns the value in the tunable's type, because JSON and command lines may have 1 for 1.0."""
    if name not in known:
        raise ValueError(f"{name}: no such tunable; there are {', '.join(sorted(known))}")
    wanted = type(known[name])
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{name}: is a {wanted.__name__}, not a {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: is not a finite number")
    return value


def slow_down(pace: Pace, step_delay_s: float) -> None:
    """Sets the delay between steps. Raises ValueError if it is not within 0 and MAX_STEP_DELAY_S."""
    if not 0 <= step_delay_s <= MAX_STEP_DELAY_S:  # false for NaN
        raise ValueError(f"step_delay_s: is not within 0 and {MAX_STEP_DELAY_S:g}")
    pace.step_delay_s = step_delay_s
