"""The parts of the worker's memory that are released to the system, and the pause that this requires.

Commands read and write this state on the loop's thread.
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


class Occupation:
    """The released parts of one worker's memory.

    While a part is released, the scheduler is paused and refuses requests, so that gateways use other workers.
    """

    def __init__(self, clock: Callable[[], float], weights: ServedWeights | None = None) -> None:
        """Starts with all memory in use.

        Args:
            clock: the loop's clock, in seconds.
            weights: is informed about new weights, or None if the model has no revision.
        """
        self._clock = clock
        self._weights = weights
        self._released: list[MemoryPart] = []
        self._paused_here = False

    @property
    def released(self) -> tuple[MemoryPart, ...]:
        return tuple(part for part in MemoryPart if part in self._released)

    def release(self, control: SchedulerControl, executor: Executor, parts: Sequence[MemoryPart]) -> None:
        """Releases parts of the memory, and forgets all cached prefixes and sessions. No request may be present.

        Args:
            control: the scheduler's control.
            executor: the owner of the memory.
            parts: the parts; all of them if empty.

        Raises:
            OperationRefused: nothing has changed.
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
        control.reset_memory()  # for the weights, too: the folder may have other weights when they are loaded again

    def resume(self, control: SchedulerControl, executor: Executor, parts: Sequence[MemoryPart]) -> None:
        """Allocates released parts again. When all parts are back, the scheduler accepts requests.

        Args:
            control: the scheduler's control.
            executor: the owner of the memory.
            parts: the parts; all released ones if empty.

        Raises:
            OperationRefused: nothing has changed.
        """
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
        """Pauses the scheduler for an operator. This pause continues after all memory is back."""
        control.pause(mode, self._clock())
        self._paused_here = False

    def unpause(self, control: SchedulerControl) -> None:
        """Ends a pause. Raises OperationRefused while memory is released."""
        if self._released:
            parts = " and ".join(part.value for part in self.released)
            raise OperationRefused(f"{parts} must be resumed first: released memory cannot serve requests")
        control.resume()


def _resume_weights(control: SchedulerControl, executor: Executor, operation: ResumeMemory, weights: ServedWeights) -> None:
    """Loads the weights again and computes their revision.

    If the revision cannot be computed, the weights are released again, because their name would be unknown.

    Raises:
        OperationRefused: nothing has changed.
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
