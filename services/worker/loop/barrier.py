"""The commands of the control service to the worker's loop, and the conditions under which the loop runs them."""

from __future__ import annotations

import concurrent.futures
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.worker.core.control import SchedulerControl
from services.worker.exec.contracts.protocol import Executor


class Barrier(enum.Enum):
    """The condition for running a command. Each barrier includes the conditions of the barriers above it."""

    NONE = "none"  # between two steps, when the loop reads its messages; a step may be in flight
    DRAINED = "drained"  # no step is in flight; the loop commits the one in flight first
    IDLE = "idle"  # no request and no page operation either; the loop serves until then, or until the deadline


@dataclass(slots=True)
class Pace:
    """The speed of the loop. Commands change it on the loop's thread."""

    step_delay_s: float = 0.0  # least seconds between the launches of two steps; 0: no limit


class NotIdle(RuntimeError):
    """A command has reached its deadline before its barrier held. The message has the reason, for example the open requests."""


class LoopEnded(RuntimeError):
    """The loop has ended or is ending. The command has not run and will not run."""


Action = Callable[[SchedulerControl, Executor, Pace], Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A message that makes the loop run an action on its thread when the barrier holds.

    The future gets the action's result or its exception, NotIdle or LoopEnded. Before it runs the action, the loop calls
    future.set_running_or_notify_cancel(), and it drops a command that its caller has cancelled.
    """

    barrier: Barrier
    action: Action
    future: concurrent.futures.Future[Any]
    deadline: float  # on the loop's clock (time.monotonic); the command does not run later
