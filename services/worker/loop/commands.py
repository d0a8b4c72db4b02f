"""Operators' commands on their way through the loop: each runs once its barrier holds, or fails at its deadline.

Single owner: the loop, on its thread. A command's future is settled exactly once, unless its caller has cancelled it.
"""

from __future__ import annotations

from collections.abc import Callable

from services.worker.core.control import SchedulerControl
from services.worker.core.scheduler import Scheduler
from services.worker.exec.contracts.protocol import Executor
from services.worker.loop.barrier import Barrier, Command, LoopEnded, NotIdle, Pace


class PendingCommands:
    def __init__(
        self, core: Scheduler, control: SchedulerControl, executor: Executor, pace: Pace, begins: Callable[[float | None], None]
    ) -> None:
        """begins: told of a command's deadline when it is about to run, and None when it has."""
        self._core, self._control = core, control
        self._executor, self._pace = executor, pace
        self._begins = begins
        self._waiting: list[Command] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def wants_drained(self) -> bool:
        """Some command runs as soon as no step is in flight."""
        if self._core.idle and self._core.settled:
            return bool(self._waiting)
        return any(command.barrier is not Barrier.IDLE for command in self._waiting)

    @property
    def waits_for_settling(self) -> bool:
        """Some command runs as soon as no operation on pages is under way."""
        return self._core.idle and any(command.barrier is Barrier.IDLE for command in self._waiting)

    def add(self, command: Command, now: float) -> None:
        """Runs it at once if it asks for no barrier."""
        if command.barrier is Barrier.NONE:
            self._run(command, now)
        else:
            self._waiting.append(command)

    def run_drained(self, now: float) -> None:
        """No step is in flight: runs, in order, what needs no more than that, and what needs idleness if there is."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            if command.barrier is Barrier.DRAINED or (self._core.idle and self._core.settled):
                self._run(command, now)
            else:
                self._waiting.append(command)

    def sweep(self, now: float) -> None:
        """Drops those whose caller has left, and tells those whose time is over."""
        for command in list(self._waiting):
            if command.future.cancelled():
                self._waiting.remove(command)
            elif command.deadline <= now:
                self._waiting.remove(command)
                _refuse(command, NotIdle(self._why_not_idle()))

    def end(self) -> None:
        """The loop ends."""
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
        except Exception as error:  # the operator's, whatever it is; the loop goes on
            command.future.set_exception(error)
        else:
            command.future.set_result(result)
        finally:
            self._begins(None)


def _refuse(command: Command, error: Exception) -> None:
    if command.future.set_running_or_notify_cancel():
        command.future.set_exception(error)
