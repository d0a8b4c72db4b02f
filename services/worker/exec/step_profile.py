"""A torch profile of the thread that starts it, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from services.worker.exec.contracts.operations import OperationRefused


class StepProfile:
    """At most one profile at a time. Belongs to the thread whose steps it records: torch's profiler is one thread's."""

    def __init__(self, activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU,)) -> None:
        self._activities = list(activities)
        self._running: tuple[profile, Path] | None = None

    def start(self, path: Path) -> None:
        """Raises OperationRefused if one runs."""
        if self._running is not None:
            raise OperationRefused("a profile is running already")
        running = profile(activities=self._activities, record_shapes=True)
        running.start()
        self._running = running, path

    def stop(self) -> None:
        """Writes the trace. Raises OperationRefused if none runs, or the file cannot be written; the profile is over then too."""
        if self._running is None:
            raise OperationRefused("no profile is running")
        (running, path), self._running = self._running, None
        running.stop()
        try:
            path.touch()  # the trace writer itself only logs what it cannot open
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise OperationRefused(f"cannot write {path}: {error}") from error

    def record(self, name: str, work: Callable[[], None]) -> None:
        """Does the work; under this name in the trace, if a profile runs."""
        if self._running is None:
            work()
            return
        with record_function(name):
            work()
