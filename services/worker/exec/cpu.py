"""The executor for CPUs: one thread with a FIFO queue stands for the forward stream.

The thread alone touches tensors, pools and the relay. The loop's thread only queues work and waits; each Run carries its
own event, so a failure reaches the waiter of the step that failed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from services.worker.core.contracts.plan import BatchPlan, StepResult
from services.worker.exec.contracts.operations import Operation, OperationRefused
from services.worker.exec.contracts.protocol import ExecutorError, Masks, Run
from services.worker.exec.operator import Operator, Releasable
from services.worker.exec.runner import CpuRun, ModelRunner
from services.worker.exec.step_profile import StepProfile

CLOSE_TIMEOUT_S = 30.0


class CpuExecutor:
    """Implements exec.protocol.Executor. A failed step fails its own waiter; the thread goes on with the next one.

    memory: None where nothing can be released, for it could not be made again.
    """

    def __init__(self, model: ModelRunner, num_threads: int, memory: Releasable | None = None) -> None:
        self._model = model
        self._profile = StepProfile()
        self._operator = Operator(self._profile, memory)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(num_threads,), name="cpu-forward", daemon=True)
        self._thread.start()

    def forward(self, plan: BatchPlan) -> CpuRun:
        run = CpuRun(plan)
        self._queue.put(partial(self._step, "forward", self._model.forward, run))
        return run

    def sample(self, run: Run, masks: Masks) -> None:
        own = _own(run)
        own.masks = masks
        self._queue.put(partial(self._last_step, own))

    def wait(self, run: Run) -> StepResult:
        own = _own(run)
        own.done.wait()
        if own.error is not None or own.result is None:
            raise ExecutorError(f"step {own.plan.step_id} failed: {own.error!r}") from own.error
        return own.result

    def apply(self, operation: Operation) -> None:
        done: Future[None] = Future()
        self._queue.put(partial(self._operate, operation, done))
        try:
            done.result()
        except OperationRefused:
            raise
        except Exception as error:
            raise ExecutorError(f"{type(operation).__name__} failed: {error!r}") from error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # per thread, hence here
        with torch.inference_mode():
            while (task := self._queue.get()) is not None:
                task()

    def _step(self, name: str, work: Callable[[CpuRun], None], run: CpuRun) -> None:
        try:
            if run.error is None:
                self._profile.record(f"{name} {run.plan.step_id}", partial(work, run))
        except Exception as error:  # of any kind: it belongs to the waiter of this step
            run.error = error
            run.done.set()

    def _last_step(self, run: CpuRun) -> None:
        self._step("sample", self._model.sample, run)
        run.done.set()

    def _operate(self, operation: Operation, done: Future[None]) -> None:
        try:
            self._operator.do(operation)
        except Exception as error:  # of any kind: it belongs to the operator
            done.set_exception(error)
        else:
            done.set_result(None)


def _own(run: Run) -> CpuRun:
    if not isinstance(run, CpuRun):
        raise TypeError(f"not a run of this executor: {run!r}")
    return run
