"""The contract between the worker's loop and an executor. No torch here, so that the fake executor needs none.

Called from the loop's thread only. Device work of all calls runs in call order (one stream); see docs/design/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan, StepResult
from services.worker.core.contracts.reservations import ReservationEvents
from services.worker.core.contracts.transfers import Fact, PageOperation
from services.worker.exec.contracts.operations import Operation

Masks = Mapping[int, NDArray[np.uint32]]
Guesses = Mapping[int, Sequence[int]]
NO_MASKS: Masks = {}


class Run(Protocol):
    """A launched step. Owned by the executor; the loop only hands it back."""

    @property
    def plan(self) -> BatchPlan: ...


class Executor(Protocol):
    """Executes plans.

    forward: launches the forward pass and returns at once, unless it has to know first how many guesses the step before has
        accepted. Reads the plan until wait() has returned.
    sample: launches sampling for a launched step, exactly once per run, after its forward and before the next forward.
        masks: row -> uint32[ceil(V / 32)], bit i of word w set where token 32 w + i may be sampled, for rows of
        plan.mask_rows; read until wait() has returned. A mask row without a mask here is sampled unmasked: its request
        has left since the step was planned. behind: row -> uint32[n, ceil(V / 32)], the same for the places behind each of
        its first n guesses; of a mask row no further ones are verified.
    guesses: row -> what it guesses to come behind the input tokens of a launched step's decode rows, before it is sampled.
        Blocks until that is known, not until the forward pass is done. Empty of a step that has failed.
    wait: blocks until the step's result is on the host. Raises ExecutorError if the device work failed; the step's
        effects are then undefined, and the slots in it must not be read again.
    transfer: begins operations on pages once every step launched before has ended, and returns at once. Raises nothing: each
        ends in one fact.
    facts: of operations that have ended since the last call; never blocks.
    wake_on_facts: has `wake` called, on any thread, whenever there are facts to be taken.
    rooms: what has become of rooms: of this worker's, before any step is launched that may write what was in them. Never blocks.
    apply: runs an operation in call order and returns when it is done. No step may be in flight, and none may be launched
        while KV or weights are released. Raises OperationRefused, and then nothing has changed, or ExecutorError.
    close: ends threads and frees device memory; no call may follow.
    """

    def forward(self, plan: BatchPlan) -> Run: ...

    def guesses(self, run: Run) -> Guesses: ...

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None: ...

    def wait(self, run: Run) -> StepResult: ...

    def transfer(self, operations: Sequence[PageOperation]) -> None: ...

    def facts(self) -> Sequence[Fact]: ...

    def wake_on_facts(self, wake: Callable[[], None]) -> None: ...

    def rooms(self, events: ReservationEvents) -> None: ...

    def apply(self, operation: Operation) -> None: ...

    def close(self) -> None: ...


class ExecutorError(RuntimeError):
    """A step failed as a whole. Every request in it must be ended or replayed."""
