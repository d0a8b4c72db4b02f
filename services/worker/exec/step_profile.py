"""A torch profile of the thread that runs the steps, written as a Chrome trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from services.worker.exec.contracts.operations import OperationRefused


class StepProfile:
    """Starts and stops profiles, at most one at a time.

    Belongs to the thread that runs the steps, because torch's profiler records one thread.
    """

    def __init__(self, activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU,)) -> None:
        self._activities = list(activities)
        self._running: tuple[profile, Path] | None = None

    def start(self, path: Path) -> None:
        """Starts a profile that stop() writes to `path`. Raises OperationRefused if a profile is running."""
        if self._running is not None:
            raise OperationRefused("a profile is running already")
        running = profile(activities=self._activities, record_shapes=True)
        running.start()
        self._running = running, path

    def stop(self) -> None:
        """Ends the profile and writes the trace.

        Raises:
            OperationRefused: no profile is running, or the file cannot be written. In both cases no profile runs afterwards.
        """
        if self._running is None:
            raise OperationRefused("no profile is running")
        (running, path), self._running = self._running, None
        running.stop()
        try:
            path.touch()  # raises if the file cannot be opened; the trace writer would only log that
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise OperationRefused(f"cannot write {path}: {error}") from error

    def record(self, name: str, work: Callable[[], None]) -> None:
        """Calls `work`, with an entry of this name in the trace if a profile is running."""
        if self._running is None:
            work()
            return
        with record_function(name):
            work()
