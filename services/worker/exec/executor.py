"""The executor, which runs steps on the streams of a GPU or a CPU and waits only for their results.

Between two steps, it also runs the operations that operators request: torch profiles, and the release of memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from torch.profiler import ProfilerActivity, profile, record_function

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, StepResult
from rootstock_llm.services.worker.core.contracts.reservations import ReservationEvents
from rootstock_llm.services.worker.core.contracts.transfers import Deleted, Fact, PageOperation
from rootstock_llm.services.worker.exec.contracts.operations import (
    DeleteStored,
    Operation,
    OperationRefused,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from rootstock_llm.services.worker.exec.contracts.peer_pages import KvServer, PeerReader
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, DraftTokens, ExecutorError, Masks, Run
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner, StepRun
from rootstock_llm.services.worker.exec.streams.copies import Readback
from rootstock_llm.services.worker.exec.tiers.page_mover import PageMover

logger = logging.getLogger(__name__)


class Steps(Protocol):
    """Launches steps on the streams, in their order: a DeviceRunner, or DraftedSteps on top of one."""

    def forward(self, run: StepRun) -> None: ...

    def sample(self, run: StepRun, masks: Masks, behind: Masks) -> None: ...

    def result(self, run: StepRun) -> StepResult: ...

    def release(self, run: StepRun) -> None: ...


def _ignore(_: str) -> None:
    return


class DeviceExecutor:
    """Implements contracts.protocol.Executor for a device. If a step fails, only the wait for that step raises."""

    def __init__(
        self,
        runner: DeviceRunner,
        memory: Releasable | None = None,
        on_lost: Callable[[str], None] = _ignore,
        steps: Steps | None = None,
        mover: PageMover | None = None,
        server: KvServer | None = None,
    ) -> None:
        """Takes the parts.

        Args:
            memory: releases and resumes memory, or None if memory cannot be released, because it could not be restored.
            on_lost: called once with a sentence if the device stops responding. The process must then be replaced.
            steps: launches steps, or None for the runner itself, which verifies no draft tokens.
            mover: moves pages between tiers and workers, or None without tiers and remote workers.
            server: lets other workers read this worker's KV reservations, or None if no worker reads here.
        """
        self._runner, self._streams = runner, runner.streams
        self._steps: Steps = runner if steps is None else steps
        self.on_lost = on_lost
        self._mover, self._server = mover, server
        self._lost, self._losing = False, threading.Lock()
        if mover is not None:
            mover.on_lost = self._lose
        on_gpu = self._streams.device.type == "cuda"
        self._profile = StepProfile((ProfilerActivity.CPU, ProfilerActivity.CUDA) if on_gpu else (ProfilerActivity.CPU,))
        self._operator = Operator(self._profile, memory)

    def wake_on_facts(self, wake: Callable[[], None]) -> None:
        """Registers `wake`, which is called on any thread whenever facts() has new facts."""
        if self._mover is not None:
            self._mover.on_fact = wake

    @property
    def runner(self) -> DeviceRunner:
        return self._runner

    def forward(self, plan: BatchPlan) -> StepRun:
        run = StepRun(plan, Readback(self._streams))
        self._streams.launch(partial(self._forward, run))
        return run

    def draft_tokens(self, run: Run) -> DraftTokens:
        return _own(run).draft_tokens.result()

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        own = _own(run)
        self._streams.launch(partial(self._sample, own, masks, behind))
        own.result = self._streams.collect(partial(self._result, own))

    def wait(self, run: Run) -> StepResult:
        own = _own(run)
        assert own.result is not None, "a step is sampled once, and then waited for once"
        result, own.result = own.result, None  # otherwise a reference cycle would keep the step's tensors alive
        return result()

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        for operation in operations:
            assert self._mover is not None, "only workers with tiers or remote workers have operations"
            self._mover.begin(operation)

    def facts(self) -> Sequence[Fact]:
        return () if self._mover is None else self._mover.facts()

    @property
    def peer_reader(self) -> PeerReader | None:
        return None if self._mover is None else self._mover.peers

    @property
    def kv_server(self) -> KvServer | None:
        return self._server

    def change_reservations(self, events: ReservationEvents) -> None:
        if self._server is not None:
            if events.closed:
                self._server.shut(events.closed)
            for opened in events.opened:
                self._server.open(opened)
        if self._mover is not None:
            for source in events.released:
                self._mover.leave(source)

    def apply(self, operation: Operation) -> None:
        if isinstance(operation, DeleteStored):
            if self._mover is not None:
                self._mover.delete_stored(operation.which, operation.done)
            elif operation.done.set_running_or_notify_cancel():
                operation.done.set_result(Deleted(0))
            return
        if isinstance(operation, ReleaseMemory) and self._server is not None:
            self._server.shut_all()  # other workers must not read released memory
        try:
            if self._mover is not None:
                self._mover.settle()  # ends copies into pages that may be released
            self._streams.collect(partial(self._operate, operation))()
        except OperationRefused:
            raise
        except Exception as error:
            raise ExecutorError(f"{type(operation).__name__} failed: {error!r}") from error

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._mover is not None:
            self._mover.close()
        self._streams.collect(self._end)()
        self._streams.close()

    # Work on the streams

    def _forward(self, run: StepRun) -> None:
        try:
            self._profile.record(f"forward {run.plan.step_id}", partial(self._steps.forward, run))
        except Exception as error:  # any exception: wait() of this step raises it
            self._failed(run, error)

    def _sample(self, run: StepRun, masks: Masks, behind: Masks) -> None:
        try:
            if run.error is None:
                self._profile.record(f"sample {run.plan.step_id}", partial(self._steps.sample, run, masks, behind))
            else:
                self._steps.release(run)
        except Exception as error:  # any exception, as above
            self._failed(run, error)

    def _result(self, run: StepRun) -> StepResult:
        if run.error is None:
            try:
                return self._steps.result(run)
            except Exception as error:  # any exception, as above; a device reports errors of its kernels here
                self._failed(run, error)
        raise ExecutorError(f"step {run.plan.step_id} failed: {run.error!r}") from run.error

    def _operate(self, operation: Operation) -> None:
        self._runner.settle()
        self._streams.synchronize()
        self._operator.do(operation)

    def _end(self) -> None:
        self._settle()
        self._runner.drop()

    def _failed(self, run: StepRun, error: Exception) -> None:
        run.error = error
        run.publish({})
        if self._settle():
            self._runner.free_uploads()

    def _settle(self) -> bool:
        """Waits for the device. Returns False if the device is lost."""
        if self._lost:
            return False
        try:
            self._streams.synchronize()
        except Exception as failure:  # any exception of the driver: the device cannot be used any longer
            self._lose(f"the device does not respond: {failure}")
        return not self._lost

    def _lose(self, sentence: str) -> None:
        with self._losing:
            was_lost, self._lost = self._lost, True
        if not was_lost:
            self.on_lost(sentence)


def _own(run: Run) -> StepRun:
    if not isinstance(run, StepRun):
        raise TypeError(f"not a run of this executor: {run!r}")
    return run


class Releasable(Protocol):
    """Memory that can be released and resumed."""

    def release(self, parts: ReleaseMemory) -> None: ...

    def resume(self, parts: ResumeMemory) -> None:
        """Allocates released parts again. If this fails, raises OperationRefused, and the parts stay released."""


class Operator:
    """Runs operations on the thread that runs the steps."""

    def __init__(self, profile: StepProfile, memory: Releasable | None) -> None:
        self._profile, self._memory = profile, memory  # memory is None if it cannot be released

    def do(self, operation: Operation) -> None:
        """Runs the operation. Raises OperationRefused."""
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


class StepProfile:
    """Starts and stops profiles, at most one at a time.

    Belongs to the thread that runs the steps, because torch's profiler records one thread.
    """

    def __init__(self, activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU,)) -> None:
        self._activities = list(activities)
        self._running: tuple[profile, Path] | None = None

    def start(self, path: Path) -> None:
        """Starts a profile that stop() writes to `path`. Raises OperationRefused if a profile is running."""
        if self._running is not None:
            raise OperationRefused("a profile is running already")
        running = profile(activities=self._activities, record_shapes=True)
        running.start()
        self._running = running, path

    def stop(self) -> None:
        """Ends the profile and writes the trace.

        Raises:
            OperationRefused: no profile is running, or the file cannot be written. In both cases no profile runs afterwards.
        """
        if self._running is None:
            raise OperationRefused("no profile is running")
        (running, path), self._running = self._running, None
        running.stop()
        try:
            path.touch()  # raises if the file cannot be opened; the trace writer would only log that
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise OperationRefused(f"cannot write {path}: {error}") from error

    def record(self, name: str, work: Callable[[], None]) -> None:
        """Calls `work`, with an entry of this name in the trace if a profile is running."""
        if self._running is None:
            work()
            return
        with record_function(name):
            work()
