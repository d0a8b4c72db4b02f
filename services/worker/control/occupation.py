"""Which parts of the worker's memory are given back to the system, and the pause that this needs.

Read and written by commands, on the loop's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from services.worker.core.contracts.messages import PauseMode
from services.worker.core.control import SchedulerControl
from services.worker.exec.contracts.operations import OperationRefused, ReleaseMemory, ResumeMemory
from services.worker.exec.contracts.protocol import Executor
from services.worker.identity.model_identity import ServedWeights
from services.worker.identity.weights_revision import WeightsChanged


class MemoryPart(enum.Enum):
    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"


class Occupation:
    """While a part is released the scheduler is paused and turns new requests away, so that front ends go elsewhere. clock: the
    loop's, in seconds. weights: told which ones have come back; None where they have no name."""

    def __init__(self, clock: Callable[[], float], weights: ServedWeights | None = None) -> None:
        self._clock = clock
        self._weights = weights
        self._released: list[MemoryPart] = []
        self._paused_here = False

    @property
    def released(self) -> tuple[MemoryPart, ...]:
        return tuple(part for part in MemoryPart if part in self._released)

    def release(self, control: SchedulerControl, executor: Executor, parts: Sequence[MemoryPart]) -> None:
        """Only while no request is here. Forgets all cached prefixes and sessions. parts: none for all.

        Raises OperationRefused, and then nothing has changed.
        """
        wanted = [part for part in MemoryPart if part in parts or not parts]
        for part in wanted:
            if part in self._released:
                raise OperationRefused(f"{part.value} is released already")
        executor.apply(ReleaseMemory(kv=MemoryPart.KV_CACHE in wanted, weights=MemoryPart.WEIGHTS in wanted))
        self._released += wanted
        control.close("the worker's memory is released")
        if not control.paused:
            control.pause(PauseMode.ABORT, self._clock())
            self._paused_here = True
        control.reset_memory()  # also for the weights: others may stand in the folder when they come back

    def resume(self, control: SchedulerControl, executor: Executor, parts: Sequence[MemoryPart]) -> None:
        """parts: none for all that is released. Raises OperationRefused, and then nothing has changed."""
        wanted = [part for part in MemoryPart if part in (parts or self._released)]
        if not wanted:
            raise OperationRefused("nothing is released")
        for part in wanted:
            if part not in self._released:
                raise OperationRefused(f"{part.value} is not released")
        operation = ResumeMemory(kv=MemoryPart.KV_CACHE in wanted, weights=MemoryPart.WEIGHTS in wanted)
        if operation.weights and self._weights is not None:
            begun = self._clock()
            _resume_weights(control, executor, operation, self._weights)
            self._weights.reload_s = self._clock() - begun
        else:
            executor.apply(operation)
        self._released = [part for part in self._released if part not in wanted]
        if self._released:
            return
        control.reopen()
        if self._paused_here:
            control.resume()
            self._paused_here = False

    def pause(self, control: SchedulerControl, mode: PauseMode) -> None:
        """An operator's pause; it outlasts the one that released memory needs."""
        control.pause(mode, self._clock())
        self._paused_here = False

    def unpause(self, control: SchedulerControl) -> None:
        """Raises OperationRefused while there is memory missing to run with."""
        if self._released:
            parts = " and ".join(part.value for part in self.released)
            raise OperationRefused(f"{parts} must be resumed first: released memory cannot serve requests")
        control.resume()


def _resume_weights(control: SchedulerControl, executor: Executor, operation: ResumeMemory, weights: ServedWeights) -> None:
    """Names them while they are loaded. Where that fails, nobody could say which weights these are: they go again. Raises
    OperationRefused, and then nothing has changed."""
    with weights.reading() as reading:
        executor.apply(operation)
        try:
            defaults = weights.defaults()
            revision = reading.revision()
        except (OSError, ValueError, WeightsChanged) as error:
            executor.apply(ReleaseMemory(kv=operation.kv, weights=True))
            raise OperationRefused(f"cannot resume: {error}") from error
    if revision != control.revision:
        control.replace_weights(revision)
        weights.replaced(revision, defaults)
