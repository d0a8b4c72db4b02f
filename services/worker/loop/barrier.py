"""What the control service asks of the worker's loop, and what must hold when the loop does it."""

from __future__ import annotations

import concurrent.futures
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.worker.core.control import SchedulerControl
from services.worker.exec.contracts.protocol import Executor


class Barrier(enum.Enum):
    """The point of the loop at which an operation runs. Each one holds at the points of those below it."""

    NONE = "none"  # between two steps, as the loop takes its messages; a step may be in flight
    DRAINED = "drained"  # no step in flight: the loop commits the one in flight first
    IDLE = "idle"  # no request here either, and no operation on pages; the loop waits until the deadline, and serves meanwhile


@dataclass(slots=True)
class Pace:
    """How fast the loop turns. Made and read by the loop; changed by commands, on the loop's thread.

    step_delay_s: seconds that the loop waits on its inbox between two steps; 0 for none.
    """

    step_delay_s: float = 0.0


class NotIdle(RuntimeError):
    """An IDLE command's deadline has passed, and requests still run; the message says how many."""


class LoopEnded(RuntimeError):
    """The loop ends, or has ended: the command has not run and never will."""


Action = Callable[[SchedulerControl, Executor, Pace], Any]


@dataclass(frozen=True, slots=True)
class Command:
    """An inbox message. The loop runs the action on its own thread once the barrier holds, and gives the future what came of
    it: the action's result, what the action raised, NotIdle, or LoopEnded.

    deadline: on the loop's clock (time.monotonic). A command that is past it does not run. The loop calls
    future.set_running_or_notify_cancel() first, and drops a command whose caller has left.
    """

    barrier: Barrier
    action: Action
    future: concurrent.futures.Future[Any]
    deadline: float
