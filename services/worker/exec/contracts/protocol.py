"""The contract between the worker's loop and an executor. Imports no torch, so that the fake executor needs none.

Only the loop's thread calls an executor. The device runs the work of all calls in call order, as on one stream. See
docs/design/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, StepResult
from rootstock_llm.services.worker.core.contracts.reservations import ReservationEvents
from rootstock_llm.services.worker.core.contracts.transfers import Fact, PageOperation
from rootstock_llm.services.worker.exec.contracts.operations import Operation

Masks = Mapping[int, NDArray[np.uint32]]  # grammar masks, by row
DraftTokens = Mapping[int, Sequence[int]]  # draft tokens, by row
NO_MASKS: Masks = {}


class Run(Protocol):
    """A launched step. The executor owns it; the loop only passes it to the executor's methods."""

    @property
    def plan(self) -> BatchPlan: ...


class Executor(Protocol):
    """Computes the plans of the scheduler on a device."""

    def forward(self, plan: BatchPlan) -> Run:
        """Launches the forward pass.

        It does not wait for the device, with one exception: in an executor with a drafter, it may wait for tokens of earlier
        steps on which the plan depends. The executor reads the plan until wait() returns.
        """

    def draft_tokens(self, run: Run) -> DraftTokens:
        """Returns the draft tokens that follow the input tokens of the step's decode rows. Called before sample().

        Blocks until the draft tokens are known, but not until the forward pass ends. Empty if the step has failed.
        """

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        """Launches sampling for a launched step.

        It is called exactly once per run, after the step's forward() and before the next forward(). The masks are read until
        wait() returns.

        Args:
            run: the launched step.
            masks: uint32[ceil(V / 32)] for rows of plan.mask_rows. Token 32 w + i may be sampled if bit i of word w is set. If a
                row of plan.mask_rows has no mask, because its request has ended since the plan, it is sampled without a mask.
            behind: uint32[n, ceil(V / 32)] for rows of plan.mask_rows: the masks of the positions after each of the row's first n
                draft tokens. Draft tokens of a mask row after the first n are not verified.
        """

    def wait(self, run: Run) -> StepResult:
        """Blocks until the step's result is on the host.

        Raises:
            ExecutorError: the device work failed. The effects of the step are undefined, and its slots must not be read again.
        """

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        """Queues page operations, which begin after all steps that were launched before this call. Does not block.

        It raises no exception. Each operation, including a failed one, has one result in facts().
        """

    def facts(self) -> Sequence[Fact]:
        """Returns the results of page operations that have ended since the last call, and changes of the tiers. Never blocks."""

    def wake_on_facts(self, wake: Callable[[], None]) -> None:
        """Registers `wake`, which is called on any thread whenever facts() has something to return."""

    def change_reservations(self, events: ReservationEvents) -> None:
        """Applies changes of KV reservations. Never blocks.

        The loop reports closed reservations of this worker before it launches a step that may write their pages.
        """

    def apply(self, operation: Operation) -> None:
        """Runs an operation after the work of all earlier calls, and returns when it is done.

        No step may be in flight. No step may be launched while KV or weights are released. DeleteStored is an exception: it is
        only queued, steps may be in flight, and its result goes to DeleteStored.done.

        Raises:
            OperationRefused: nothing has changed.
            ExecutorError: the operation failed.
        """

    def close(self) -> None:
        """Ends the threads and frees the device memory. No other call may follow."""


class ExecutorError(RuntimeError):
    """Raised if a whole step or an operation fails. The caller must end or replay each request of a failed step."""


@dataclass(slots=True)
class ExecutorStats:
    """Counts of steps since the executor's start. The thread that launches steps writes them, and metric scrapes read them."""

    graph_steps: int = 0  # steps that were replayed as CUDA graphs
    eager_steps: int = 0  # steps that were launched kernel by kernel
    pieces: int = 0  # forward passes of steps that were computed in pieces
    given_up: int = 0  # requests that ended because the device had no memory to compute one of their tokens
