"""Does what operators ask of an executor, between two steps, for whichever executor runs them."""

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
    """Memory that can be given back and taken again. resume raises OperationRefused; what was released then stays so."""

    def release(self, parts: ReleaseMemory) -> None: ...

    def resume(self, parts: ResumeMemory) -> None: ...


class Operator:
    """memory: None where nothing can be released, for it could not be made again. Belongs to the thread that runs the steps."""

    def __init__(self, profile: StepProfile, memory: Releasable | None) -> None:
        self._profile, self._memory = profile, memory

    def do(self, operation: Operation) -> None:
        """Raises OperationRefused."""
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
