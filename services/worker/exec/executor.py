"""The executor, which runs steps on the streams of a GPU or a CPU and waits only for their results.

Between two steps, it also runs the operations that operators request: torch profiles, the release of memory and its allocation
after a release, and the deletion of stored pages.
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
    """Launches steps on the streams, in call order: a DeviceRunner, or DraftedSteps, which calls a DeviceRunner."""

    def forward(self, run: StepRun) -> None: ...

    def sample(self, run: StepRun, masks: Masks, behind: Masks) -> None: ...

    def result(self, run: StepRun) -> StepResult: ...

    def release(self, run: StepRun) -> None: ...


def _ignore(_: str) -> None:
    return


class DeviceExecutor:
    """Implements contracts.protocol.Executor for a device. If a step fails, only the wait() for this step raises."""

    def __init__(
        self,
        runner: DeviceRunner,
        memory: Releasable | None = None,
        on_lost: Callable[[str], None] = _ignore,
        steps: Steps | None = None,
        mover: PageMover | None = None,
        server: KvServer | None = None,
    ) -> None:
        """Stores the parts, and sets the mover's on_lost callback.

        Args:
            runner: launches forward passes and sampling.
            memory: releases and resumes memory. None if the model was not loaded from a folder, so that it could not be resumed.
            on_lost: called once with the reason if the device stops responding, or if steps wait for pages that cannot arrive.
                The process must then be replaced.
            steps: launches steps; None for the runner itself, which verifies no draft tokens.
            mover: moves pages between tiers and workers; None without tiers and remote workers.
            server: lets remote workers read this worker's KV reservations; None if no remote worker reads them.
        """
        self._runner, self._streams = runner, runner.streams
        self._steps: Steps = runner if steps is None else steps
        self.on_lost = on_lost
        self._mover, self._server = mover, server
        self._lost, self._lost_lock = False, threading.Lock()
        if mover is not None:
            mover.on_lost = self._lose
        on_gpu = self._streams.device.type == "cuda"
        self._profile = StepProfile((ProfilerActivity.CPU, ProfilerActivity.CUDA) if on_gpu else (ProfilerActivity.CPU,))
        self._operations = OperationRunner(self._profile, memory)

    def wake_on_facts(self, wake: Callable[[], None]) -> None:
        """See Executor. Without a page mover, there are no facts, and `wake` is never called."""
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
        result, own.result = own.result, None  # the function refers to the run; this cycle would keep the step's tensors alive
        return result()

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        for operation in operations:
            assert self._mover is not None, "the core plans page operations only if the executor has a page mover"
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
                self._server.close_reservations(events.closed)
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
            self._server.close_all_reservations()  # remote workers must not read released memory
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
        except Exception as error:  # an error of any type; wait() raises ExecutorError for this step
            self._failed(run, error)

    def _sample(self, run: StepRun, masks: Masks, behind: Masks) -> None:
        try:
            if run.error is None:
                self._profile.record(f"sample {run.plan.step_id}", partial(self._steps.sample, run, masks, behind))
            else:
                self._steps.release(run)
        except Exception as error:  # an error of any type, as in _forward()
            self._failed(run, error)

    def _result(self, run: StepRun) -> StepResult:
        if run.error is None:
            try:
                return self._steps.result(run)
            except Exception as error:  # an error of any type; a GPU reports errors of its kernels here
                self._failed(run, error)
        raise ExecutorError(f"step {run.plan.step_id} failed: {run.error!r}") from run.error

    def _operate(self, operation: Operation) -> None:
        self._runner.settle()
        self._streams.synchronize()
        self._operations.run(operation)

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
        except Exception as failure:  # an error of any type; after an error of the driver, the device cannot be used
            self._lose(f"the device does not respond: {failure}")
        return not self._lost

    def _lose(self, reason: str) -> None:
        with self._lost_lock:
            was_lost, self._lost = self._lost, True
        if not was_lost:
            self.on_lost(reason)


def _own(run: Run) -> StepRun:
    if not isinstance(run, StepRun):
        raise TypeError(f"the run is not from a DeviceExecutor: {run!r}")
    return run


class Releasable(Protocol):
    """Memory that can be released and resumed."""

    def release(self, parts: ReleaseMemory) -> None: ...

    def resume(self, parts: ResumeMemory) -> None:
        """Allocates released parts again. Raises OperationRefused if this fails; the parts then stay released."""


class OperationRunner:
    """Runs the operations that operators request. Belongs to the thread that runs the steps."""

    def __init__(self, profile: StepProfile, memory: Releasable | None) -> None:
        self._profile, self._memory = profile, memory  # memory is None if it cannot be released

    def run(self, operation: Operation) -> None:
        """Runs an operation of any type except DeleteStored. Raises OperationRefused if it cannot be run."""
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
            raise OperationRefused("this executor cannot release memory: its model was not loaded from a folder")
        return self._memory


class StepProfile:
    """Profiles steps with torch's profiler, with at most one profile at a time.

    Belongs to the thread that runs the steps, because the profiler records only the thread that starts it.
    """

    def __init__(self, activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU,)) -> None:
        self._activities = list(activities)
        self._running: tuple[profile, Path] | None = None

    def start(self, path: Path) -> None:
        """Starts a profile that stop() writes to `path`. Raises OperationRefused if a profile is running."""
        if self._running is not None:
            raise OperationRefused("a profile is already running. Stop it first.")
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
            path.touch()  # raises OSError if the file cannot be opened; export_chrome_trace() would only log it
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise OperationRefused(f"the profile cannot be written to {path}: {error}") from error

    def record(self, name: str, work: Callable[[], None]) -> None:
        """Calls `work`. If a profile is running, its trace gets an entry of this name."""
        if self._running is None:
            work()
            return
        with record_function(name):
            work()
