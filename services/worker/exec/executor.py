"""The executor: has steps run on the streams of a device, a GPU's or a CPU's, and waits for results alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch.profiler import ProfilerActivity

from services.worker.core.contracts.plan import BatchPlan, StepResult
from services.worker.core.contracts.reservations import ReservationEvents
from services.worker.core.contracts.transfers import Deleted, Fact, PageOperation
from services.worker.exec.contracts.operations import DeleteStored, Operation, OperationRefused, ReleaseMemory
from services.worker.exec.contracts.peer_pages import PeerReader, RoomServer
from services.worker.exec.contracts.protocol import NO_MASKS, ExecutorError, Guesses, Masks, Run
from services.worker.exec.operator import Operator, Releasable
from services.worker.exec.step.model_runner import DeviceRun, DeviceRunner
from services.worker.exec.step_profile import StepProfile
from services.worker.exec.streams.readback import Readback
from services.worker.exec.tiers.page_mover import PageMover

logger = logging.getLogger(__name__)


def _ignore(_: str) -> None:
    return


class Steps(Protocol):
    """What an executor has done on the streams, in order of the steps."""

    def forward(self, run: DeviceRun) -> None: ...

    def sample(self, run: DeviceRun, masks: Masks, behind: Masks) -> None: ...

    def result(self, run: DeviceRun) -> StepResult: ...

    def release(self, run: DeviceRun) -> None: ...


class DeviceExecutor:
    """Implements exec.protocol.Executor. A failed step fails its own waiter.

    steps: what computes them, the runner itself where nothing is drafted. mover: of pages between tiers and workers, None where
    there is neither. server: lets other workers read this one's rooms; None: nobody reads here.
    memory: None where nothing can be released, for it could not be made again. on_lost: called once, with a sentence, when the
    device answers nothing any more: the process has to be replaced.
    """

    def __init__(
        self,
        runner: DeviceRunner,
        memory: Releasable | None = None,
        on_lost: Callable[[str], None] = _ignore,
        steps: Steps | None = None,
        mover: PageMover | None = None,
        server: RoomServer | None = None,
    ) -> None:
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
        """wake: called on any thread whenever facts() has more to give."""
        if self._mover is not None:
            self._mover.on_fact = wake

    @property
    def runner(self) -> DeviceRunner:
        return self._runner

    def forward(self, plan: BatchPlan) -> DeviceRun:
        run = DeviceRun(plan, Readback(self._streams))
        self._streams.launch(partial(self._forward, run))
        return run

    def guesses(self, run: Run) -> Guesses:
        return _own(run).guesses.result()

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        own = _own(run)
        self._streams.launch(partial(self._sample, own, masks, behind))
        own.result = self._streams.collect(partial(self._result, own))

    def wait(self, run: Run) -> StepResult:
        own = _own(run)
        assert own.result is not None, "a step is sampled once, and then waited for once"
        result, own.result = own.result, None  # a cycle would keep the step's tensors
        return result()

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        for operation in operations:
            assert self._mover is not None, "pages are moved where there are tiers"
            self._mover.begin(operation)

    def facts(self) -> Sequence[Fact]:
        return () if self._mover is None else self._mover.facts()

    @property
    def peer_reader(self) -> PeerReader | None:
        return None if self._mover is None else self._mover.peers

    @property
    def room_server(self) -> RoomServer | None:
        return self._server

    def rooms(self, events: ReservationEvents) -> None:
        if self._server is not None:
            if events.closed:
                self._server.shut(events.closed)
            for room in events.opened:
                self._server.open(room)
        if self._mover is not None:
            for source in events.left:
                self._mover.leave(source)

    def apply(self, operation: Operation) -> None:
        if isinstance(operation, DeleteStored):
            if self._mover is not None:
                self._mover.delete_stored(operation.which, operation.done)
            elif operation.done.set_running_or_notify_cancel():
                operation.done.set_result(Deleted(0))
            return
        if isinstance(operation, ReleaseMemory) and self._server is not None:
            self._server.shut_all()  # nobody reads memory that is gone
        try:
            if self._mover is not None:
                self._mover.settle()  # into pages that may be given back
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

    # What runs on the streams

    def _forward(self, run: DeviceRun) -> None:
        try:
            self._profile.record(f"forward {run.plan.step_id}", partial(self._steps.forward, run))
        except Exception as error:  # of any kind: it belongs to the waiter of this step
            self._failed(run, error)

    def _sample(self, run: DeviceRun, masks: Masks, behind: Masks) -> None:
        try:
            if run.error is None:
                self._profile.record(f"sample {run.plan.step_id}", partial(self._steps.sample, run, masks, behind))
            else:
                self._steps.release(run)
        except Exception as error:  # as above
            self._failed(run, error)

    def _result(self, run: DeviceRun) -> StepResult:
        if run.error is None:
            try:
                return self._steps.result(run)
            except Exception as error:  # as above; a device reports here what went wrong in its kernels
                self._failed(run, error)
        raise ExecutorError(f"step {run.plan.step_id} failed: {run.error!r}") from run.error

    def _operate(self, operation: Operation) -> None:
        self._runner.settle()
        self._streams.synchronize()
        self._operator.do(operation)

    def _end(self) -> None:
        self._settle()
        self._runner.drop()

    def _failed(self, run: DeviceRun, error: Exception) -> None:
        run.error = error
        run.guess({})
        if self._settle():
            self._runner.free_uploads()

    def _settle(self) -> bool:
        """Waits for the device. False: it is lost."""
        if self._lost:
            return False
        try:
            self._streams.synchronize()
        except Exception as failure:  # whatever the driver raises: there is no device to go on with
            self._lose(f"the device does not answer any more: {failure}")
        return not self._lost

    def _lose(self, sentence: str) -> None:
        with self._losing:
            was_lost, self._lost = self._lost, True
        if not was_lost:
            self.on_lost(sentence)


def _own(run: Run) -> DeviceRun:
    if not isinstance(run, DeviceRun):
        raise TypeError(f"not a run of this executor: {run!r}")
    return run
