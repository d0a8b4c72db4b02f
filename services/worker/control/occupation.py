"""Releases the KV pool or the weights to the system and allocates them again. While they are released, the scheduler is paused.

All calls run on the scheduler loop's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from rootstock_llm.services.worker.core.contracts.messages import PauseMode
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.contracts.operations import OperationRefused, ReleaseMemory, ResumeMemory
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from rootstock_llm.services.worker.identity.model_identity import ServedWeights
from rootstock_llm.services.worker.identity.weights_revision import WeightsChanged


class MemoryPart(enum.Enum):
    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"


class MemoryControl:
    """Releases and resumes parts of a worker's memory, and records which parts are released.

    While a part is released, the scheduler is paused and refuses requests, so that gateways use other workers.
    """

    def __init__(self, clock: Callable[[], float], weights: ServedWeights | None = None) -> None:
        """Starts with all memory allocated.

        Args:
            clock: the scheduler loop's clock, in seconds.
            weights: the served weights, whose revision changes if other weights are loaded; None if the model has no revision.
        """
        self._clock = clock
        self._weights = weights
        self._released: list[MemoryPart] = []
        self._paused_here = False  # whether release() has paused the scheduler, so that resume() must end the pause

    @property
    def released(self) -> tuple[MemoryPart, ...]:
        return tuple(part for part in MemoryPart if part in self._released)

    def release(self, control: SchedulerControl, executor: Executor, parts: Sequence[MemoryPart]) -> None:
        """Releases parts of the memory and drops all cached prefixes and sessions. The worker must have no requests.

        Args:
            control: the scheduler's control.
            executor: the owner of the memory.
            parts: the parts to release; empty: all parts.

        Raises:
            OperationRefused: a part is already released, or the executor cannot release it. No state has changed.
        """
        wanted = [part for part in MemoryPart if part in parts or not parts]
        for part in wanted:
            if part in self._released:
                raise OperationRefused(f"{part.value} is already released")
        executor.apply(ReleaseMemory(kv=MemoryPart.KV_CACHE in wanted, weights=MemoryPart.WEIGHTS in wanted))
        self._released += wanted
        control.close("the worker's memory is released")
        if not control.paused:
            control.pause(PauseMode.ABORT, self._clock())
            self._paused_here = True
        # Also needed if only weights are released: ResumeMemory may load other weights, for which the cached KV is wrong.
        control.reset_memory()

    def resume(self, control: SchedulerControl, executor: Executor, parts: Sequence[MemoryPart]) -> None:
        """Allocates released parts again. When all parts are allocated, the scheduler accepts requests.

        Args:
            control: the scheduler's control.
            executor: the owner of the memory.
            parts: the parts to allocate; empty: all released parts.

        Raises:
            OperationRefused: a part is not released, or the executor cannot allocate or load it. No state has changed.
        """
        wanted = [part for part in MemoryPart if part in (parts or self._released)]
        if not wanted:
            raise OperationRefused("nothing to resume: no memory of this worker is released")
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
        """Pauses the scheduler for an operator. Only unpause() ends this pause; resume() does not end it."""
        control.pause(mode, self._clock())
        self._paused_here = False

    def unpause(self, control: SchedulerControl) -> None:
        """Ends the pause of the scheduler. Raises OperationRefused while memory is released."""
        if self._released:
            parts = " and ".join(part.value for part in self.released)
            raise OperationRefused(f"memory is released ({parts}); call ResumeMemory first")
        control.resume()


def _resume_weights(control: SchedulerControl, executor: Executor, operation: ResumeMemory, weights: ServedWeights) -> None:
    """Loads the weights again and computes their revision. If the revision cannot be computed, releases the weights again.

    Raises:
        OperationRefused: the weights cannot be loaded, or their revision cannot be computed. The weights are then still released.
    """
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
