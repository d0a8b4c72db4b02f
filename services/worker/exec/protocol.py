"""The contract between the worker's loop and an executor. No torch here, so that the fake executor needs none.

Called from the loop's thread only. Device work of all calls runs in call order (one stream); see ../../docs/architecture.md.
"""

from __future__ import annotations

from typing import Protocol

from services.worker.core.plan import BatchPlan, StepResult


class Run(Protocol):
    """A launched step. Owned by the executor; the loop only hands it back."""

    @property
    def plan(self) -> BatchPlan: ...


class Executor(Protocol):
    """Executes plans.

    forward: launches the forward pass and returns at once. Reads the plan until wait() has returned.
    sample: launches sampling for a launched step, exactly once per run, after its forward and before the next forward.
    wait: blocks until the step's result is on the host. Raises ExecutorError if the device work failed; the step's
        effects are then undefined, and the slots in it must not be read again.
    close: ends threads and frees device memory; no call may follow.
    """

    def forward(self, plan: BatchPlan) -> Run: ...

    def sample(self, run: Run) -> None: ...

    def wait(self, run: Run) -> StepResult: ...

    def close(self) -> None: ...


class ExecutorError(RuntimeError):
    """A step failed as a whole. Every request in it must be ended or replayed."""
