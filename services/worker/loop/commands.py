"""Operators' commands that wait for their barriers. Each command runs when its barrier holds, or fails at its deadline.

The loop is the owner, on its thread. The future of a command is settled exactly once, unless its caller has cancelled it.
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
