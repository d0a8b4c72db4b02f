"""Runs the operations that operators request, between two steps."""

from __future__ import annotations

from typing import Protocol

from services.worker.exec.contracts.operations import (
    Operation,
    OperationRefused,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from services.worker.exec.step_profile import StepProfile


class Releasable(Protocol):
    """Memory that can be released and resumed."""

    def release(self, parts: ReleaseMemory) -> None: ...

    def resume(self, parts: ResumeMemory) -> None:
        """Allocates released parts again. Raises OperationRefused if that fails; the parts then stay released."""


class Operator:
    """Runs operations on the thread that runs the steps."""

    def __init__(self, profile: StepProfile, memory: Releasable | None) -> None:
        self._profile, self._memory = profile, memory  # memory is None if it cannot be released

    def do(self, operation: Operation) -> None:
        """Runs the operation. Raises OperationRefused."""
        match operation:
            case StartProfile(path):
                self._profile.start(path)
            case StopProfile():
                self._profile.stop()
            case ReleaseMemory():
                self._releasable().release(operation)
            case ResumeMemory():
                self._releasable().resume(operation)

    def _releasable(self) -> Releasable:
        if self._memory is None:
            raise OperationRefused("this model's memory cannot be released")
        return self._memory
