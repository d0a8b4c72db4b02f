"""The messages to the scheduler loop from gateways, operators, the grammar compiler and the executor, and the queue of commands.

Any thread may put messages; only the loop's thread takes them. A command runs on the loop's thread when its barrier is met. If
the barrier is not met before the command's deadline, the command fails.
"""

from __future__ import annotations

import concurrent.futures
import enum
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import PagesReady, Prefetch, Submit
from rootstock_llm.services.worker.core.contracts.reservations import KvSource, ReservationReleased
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor


class Barrier(enum.Enum):
    """The condition that must be met before a command runs. Each barrier includes the conditions of the barriers above it."""

    NONE = "none"  # none: the command runs when the loop reads its messages; a step may be in flight
    DRAINED = "drained"  # no step is in flight; the loop commits the step in flight before it plans another step
    IDLE = "idle"  # also, there are no requests and no operations on device pages; the loop serves requests until then


@dataclass(slots=True)
class Pace:
    """The speed limit of the loop. Commands change it on the loop's thread."""

    step_delay_s: float = 0.0  # smallest time in seconds between the launches of two steps; 0: no delay


class NotIdle(RuntimeError):
    """A command's barrier was not met before the command's deadline. The message has the reason, such as open requests."""


class LoopEnded(RuntimeError):
    """The loop has ended or is ending, so the command is not run."""


Action = Callable[[SchedulerControl, Executor, Pace], Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A request of an operator to run an action on the loop's thread.

    The future gets the action's result or exception, or NotIdle or LoopEnded if the action was not run. A caller may cancel the
    future; the action is then not run.
    """

    barrier: Barrier
    action: Action
    future: concurrent.futures.Future[Any]
    deadline: float  # time on the loop's clock (time.monotonic) after which the action is not run


@dataclass(frozen=True, slots=True)
class Abort:
    peer: int
    handle: int


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The gRPC server has refused a request, so the core does not get it."""

    peer: int
    handle: int
    source: KvSource | None  # KV reservation at another worker, which the core releases; None: the request has no KV source


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A gateway stream has ended. All of its requests are aborted."""

    peer: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens a session."""

    session_id: str
    capacity: int  # largest number of tokens; 0: session_capacity of the settings
    ttl_s: float  # lifetime in seconds after the last turn; 0: session_ttl_s of the settings
    refusal: concurrent.futures.Future[str]  # gets the reason why the session was not opened; empty if it was opened


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Closes a session."""

    session_id: str
    closed: concurrent.futures.Future[bool]  # gets True if the session was open


@dataclass(frozen=True, slots=True)
class GrammarReady:
    spec: GrammarSpec


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """A grammar was not compiled."""

    spec: GrammarSpec
    reason: str  # message to the clients that wait for the grammar
    busy: bool = False  # whether the compiler was overloaded or had ended; a client may retry


@dataclass(frozen=True, slots=True)
class FactsReady:
    """The executor has results of page operations. The message only wakes the loop, which then reads the results."""


@dataclass(frozen=True, slots=True)
class PrefetchMore:
    """More pages of a prompt are readable at its KV source. The gateway stream has sent the prompt's Prefetch before."""

    peer: int
    ready: PagesReady


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the loop. Unfinished requests end with the error UNAVAILABLE."""


Message = (
    Submit
    | Prefetch
    | PrefetchMore
    | Abort
    | TurnedAway
    | PeerGone
    | OpenSession
    | CloseSession
    | GrammarReady
    | GrammarFailed
    | FactsReady
    | ReservationReleased
    | Command
    | Stop
)


class Inbox:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def drain(self, wait_s: float) -> list[Message]:
        """Returns all queued messages. If the queue is empty, waits up to `wait_s` seconds for a message."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


class PendingCommands:
    """The commands that wait for their barriers. Each command's future is set exactly once, unless the caller cancels it."""

    def __init__(
        self, core: Scheduler, control: SchedulerControl, executor: Executor, pace: Pace, on_run: Callable[[float | None], None]
    ) -> None:
        """Stores the objects that commands get.

        Args:
            on_run: called with a command's deadline before the command runs, and with None after it.
        """
        self._core, self._control = core, control
        self._executor, self._pace = executor, pace
        self._on_run = on_run
        self._waiting: list[Command] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def wants_drained(self) -> bool:
        """Whether a command could run if no step were in flight."""
        if self._core.idle and self._core.settled:
            return bool(self._waiting)
        return any(command.barrier is not Barrier.IDLE for command in self._waiting)

    @property
    def waits_for_settling(self) -> bool:
        """Whether a command with the barrier IDLE waits although no request is open: operations on device pages delay it."""
        return self._core.idle and any(command.barrier is Barrier.IDLE for command in self._waiting)

    def add(self, command: Command, now: float) -> None:
        """Runs a command with the barrier NONE immediately, and queues any other command."""
        if command.barrier is Barrier.NONE:
            self._run(command, now)
        else:
            self._waiting.append(command)

    def run_drained(self, now: float) -> None:
        """Runs the queued commands whose barrier is met, in order. Called while no step is in flight."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            if command.barrier is Barrier.DRAINED or (self._core.idle and self._core.settled):
                self._run(command, now)
            else:
                self._waiting.append(command)

    def drop_expired(self, now: float) -> None:
        """Removes cancelled commands and fails commands whose deadline has passed."""
        for command in list(self._waiting):
            if command.future.cancelled():
                self._waiting.remove(command)
            elif command.deadline <= now:
                self._waiting.remove(command)
                _refuse(command, NotIdle(self._why_not_idle()))

    def end(self) -> None:
        """Fails all queued commands, because the loop ends."""
        for command in self._waiting:
            _refuse(command, LoopEnded("the worker is stopping"))
        self._waiting.clear()

    def _why_not_idle(self) -> str:
        if self._core.idle:
            return "copies of cached pages are still running"
        return f"{self._core.num_requests} requests are still open"

    def _run(self, command: Command, now: float) -> None:
        if command.deadline <= now:
            _refuse(command, NotIdle("the operation's deadline passed before the loop read the operation"))
            return
        if not command.future.set_running_or_notify_cancel():
            return
        self._on_run(command.deadline)
        try:
            result = command.action(self._control, self._executor, self._pace)
        except Exception as error:  # the operator gets any error; the loop continues
            command.future.set_exception(error)
        else:
            command.future.set_result(result)
        finally:
            self._on_run(None)


def _refuse(command: Command, error: Exception) -> None:
    if command.future.set_running_or_notify_cancel():
        command.future.set_exception(error)
