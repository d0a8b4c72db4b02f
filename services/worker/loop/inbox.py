"""The messages to the loop from gateways, signals, operators and the grammar compiler, and the queue of operators' commands.

Any thread may write messages; only the loop's thread reads them. It then owns the commands: each one runs when its barrier holds,
or fails at its deadline.
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


@dataclass(frozen=True, slots=True)
class Abort:
    peer: int
    handle: int


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A request that was refused on its gateway stream and has not reached the core."""

    peer: int
    handle: int
    source: KvSource | None  # reservation that the request was to read


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A gateway stream has ended. All of its requests are aborted."""

    peer: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens a session."""

    session_id: str
    capacity: int  # tokens; 0 for the configured capacity
    ttl_s: float  # seconds; 0 for the configured lifetime
    refusal: concurrent.futures.Future[str]  # gets the reason if the session was not opened, or an empty text


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Closes a session."""

    session_id: str
    closed: concurrent.futures.Future[bool]  # gets whether the session was open


@dataclass(frozen=True, slots=True)
class GrammarReady:
    spec: GrammarSpec


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """A grammar was not compiled."""

    spec: GrammarSpec
    reason: str  # message to the clients that wait for the grammar
    busy: bool = False  # the compiler was full; the grammar may be submitted again


@dataclass(frozen=True, slots=True)
class FactsReady:
    """The executor has facts of page operations. The message wakes a waiting loop."""


@dataclass(frozen=True, slots=True)
class PrefetchMore:
    """Further readable pages of a prompt that an earlier Prefetch of this gateway stream has named."""

    peer: int
    ready: PagesReady


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the loop. Requests that have not ended get UNAVAILABLE."""


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
        """Returns all present messages. Without any, waits up to `wait_s` seconds for one message."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


class PendingCommands:
    """The commands that wait for their barriers. The future of a command is settled once, unless its caller has cancelled it."""

    def __init__(
        self, core: Scheduler, control: SchedulerControl, executor: Executor, pace: Pace, begins: Callable[[float | None], None]
    ) -> None:
        """Starts without commands. `begins` is called with a command's deadline before it runs, and with None after it."""
        self._core, self._control = core, control
        self._executor, self._pace = executor, pace
        self._begins = begins
        self._waiting: list[Command] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def wants_drained(self) -> bool:
        """Whether a command can run as soon as no step is in flight."""
        if self._core.idle and self._core.settled:
            return bool(self._waiting)
        return any(command.barrier is not Barrier.IDLE for command in self._waiting)

    @property
    def waits_for_settling(self) -> bool:
        """Whether a command can run as soon as no operation on device pages is running."""
        return self._core.idle and any(command.barrier is Barrier.IDLE for command in self._waiting)

    def add(self, command: Command, now: float) -> None:
        """Runs a command without a barrier at once, and queues any other command."""
        if command.barrier is Barrier.NONE:
            self._run(command, now)
        else:
            self._waiting.append(command)

    def run_drained(self, now: float) -> None:
        """Runs the queued commands whose barrier holds, in order. Called while no step is in flight."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            if command.barrier is Barrier.DRAINED or (self._core.idle and self._core.settled):
                self._run(command, now)
            else:
                self._waiting.append(command)

    def sweep(self, now: float) -> None:
        """Drops cancelled commands, and fails commands that have reached their deadline."""
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
            return "copies of cached pages are still under way"
        return f"{self._core.num_requests} requests are still here"

    def _run(self, command: Command, now: float) -> None:
        if command.deadline <= now:
            _refuse(command, NotIdle("the operation's time was over before the loop came to it"))
            return
        if not command.future.set_running_or_notify_cancel():
            return
        self._begins(command.deadline)
        try:
            result = command.action(self._control, self._executor, self._pace)
        except Exception as error:  # any error belongs to the operator; the loop continues
            command.future.set_exception(error)
        else:
            command.future.set_result(result)
        finally:
            self._begins(None)


def _refuse(command: Command, error: Exception) -> None:
    if command.future.set_running_or_notify_cancel():
        command.future.set_exception(error)
