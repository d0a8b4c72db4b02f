"""The executor for CPUs: one thread with a FIFO queue stands for the forward stream.

The thread alone touches tensors, pools and the relay. The loop's thread only queues work and waits; each Run carries its
own event, so a failure reaches the waiter of the step that failed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from services.worker.core.plan import BatchPlan, StepResult
from services.worker.exec.protocol import ExecutorError, Masks, Run
from services.worker.exec.runner import CpuRun, ModelRunner

CLOSE_TIMEOUT_S = 30.0


class CpuExecutor:
    """Implements exec.protocol.Executor. A failed step fails its own waiter; the thread goes on with the next one."""

    def __init__(self, model: ModelRunner, num_threads: int) -> None:
        self._model = model
        self._queue: queue.SimpleQueue[tuple[Callable[[CpuRun], None], CpuRun, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(num_threads,), name="cpu-forward", daemon=True)
        self._thread.start()

    def forward(self, plan: BatchPlan) -> CpuRun:
        run = CpuRun(plan)
        self._queue.put((self._model.forward, run, False))
        return run

    def sample(self, run: Run, masks: Masks) -> None:
        own = _own(run)
        own.masks = masks
        self._queue.put((self._model.sample, own, True))

    def wait(self, run: Run) -> StepResult:
        own = _own(run)
        own.done.wait()
        if own.error is not None or own.result is None:
            raise ExecutorError(f"step {own.plan.step_id} failed: {own.error!r}") from own.error
        return own.result

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # per thread, hence here
        with torch.inference_mode():
            while (task := self._queue.get()) is not None:
                work, run, last = task
                try:
                    if run.error is None:
                        work(run)
                except Exception as error:  # of any kind: it belongs to the waiter of this step
                    run.error = error
                if last or run.error is not None:
                    run.done.set()


def _own(run: Run) -> CpuRun:
    if not isinstance(run, CpuRun):
        raise TypeError(f"not a run of this executor: {run!r}")
    return run
