"""The executor for GPUs: launches steps on streams of the device and waits for results alone. No thread of its own.

Runs on a CPU too, with the same code and streams that are none, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

from services.worker.core.contracts.plan import BatchPlan, StepResult
from services.worker.exec.contracts.operations import Operation, OperationRefused
from services.worker.exec.contracts.protocol import ExecutorError, Masks, Run
from services.worker.exec.operator import Operator, Releasable
from services.worker.exec.step.model_runner import DeviceRun, DeviceRunner
from services.worker.exec.step_profile import StepProfile
from services.worker.exec.streams.readback import Readback

logger = logging.getLogger(__name__)


def _ignore(_: str) -> None:
    return


class DeviceExecutor:
    """Implements exec.protocol.Executor. A failed step fails its own waiter.

    memory: None where nothing can be released, for it could not be made again. on_lost: called once, with a sentence, when
    the device answers nothing any more: the process has to be replaced.
    """

    def __init__(self, runner: DeviceRunner, memory: Releasable | None = None, on_lost: Callable[[str], None] = _ignore) -> None:
        self._runner = runner
        self.on_lost = on_lost
        self._lost = False
        on_gpu = runner.streams.device.type == "cuda"
        self._profile = StepProfile((ProfilerActivity.CPU, ProfilerActivity.CUDA) if on_gpu else (ProfilerActivity.CPU,))
        self._operator = Operator(self._profile, memory)

    @property
    def runner(self) -> DeviceRunner:
        return self._runner

    def forward(self, plan: BatchPlan) -> DeviceRun:
        run: list[DeviceRun] = []
        with torch.inference_mode():
            try:
                self._profile.record(f"forward {plan.step_id}", lambda: run.append(self._runner.forward(plan)))
            except Exception as error:  # of any kind: it belongs to the waiter of this step
                return self._failed(DeviceRun(plan, Readback(self._runner.streams)), error)
        return run[0]

    def sample(self, run: Run, masks: Masks) -> None:
        own = _own(run)
        with torch.inference_mode():
            try:
                if own.error is None:
                    self._profile.record(f"sample {own.plan.step_id}", lambda: self._runner.sample(own, masks))
                else:
                    self._runner.release(own)
            except Exception as error:  # as above
                self._failed(own, error)

    def wait(self, run: Run) -> StepResult:
        own = _own(run)
        if own.error is None:
            try:
                with torch.inference_mode():
                    return self._runner.result(own)
            except Exception as error:  # as above; a device reports here what went wrong in its kernels
                self._failed(own, error)
        raise ExecutorError(f"step {own.plan.step_id} failed: {own.error!r}") from own.error

    def apply(self, operation: Operation) -> None:
        try:
            with torch.inference_mode():
                self._runner.streams.synchronize()
                self._operator.do(operation)
        except OperationRefused:
            raise
        except Exception as error:
            raise ExecutorError(f"{type(operation).__name__} failed: {error!r}") from error

    def close(self) -> None:
        self._settle()
        self._runner.drop()

    def _failed(self, run: DeviceRun, error: Exception) -> DeviceRun:
        run.error = error
        if self._settle():
            self._runner.free_uploads()
        return run

    def _settle(self) -> bool:
        """Waits for the device. False: it is lost."""
        if self._lost:
            return False
        try:
            self._runner.streams.synchronize()
        except Exception as failure:  # whatever the driver raises: there is no device to go on with
            self._lost = True
            self.on_lost(f"the device does not answer any more: {failure}")
        return not self._lost


def _own(run: Run) -> DeviceRun:
    if not isinstance(run, DeviceRun):
        raise TypeError(f"not a run of this executor: {run!r}")
    return run
