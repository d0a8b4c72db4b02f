"""Serves the Control service. Each call sends a command with a barrier to the worker's loop and waits for its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc

from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.protos import control_pb2_grpc
from rootstock_llm.services.shared.control_values import enum_word, put_values, value_from_pb
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.control import expert_record, internal_state
from rootstock_llm.services.worker.control.flush import Flushed, flush, parse
from rootstock_llm.services.worker.control.internal_state import InternalState
from rootstock_llm.services.worker.control.occupation import MemoryControl, MemoryPart
from rootstock_llm.services.worker.control.profiles import Profiles
from rootstock_llm.services.worker.core.contracts.experts import ExpertDistribution
from rootstock_llm.services.worker.core.contracts.messages import PauseMode
from rootstock_llm.services.worker.core.contracts.transfers import Deleted
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.contracts.operations import OperationRefused
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerRate
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from rootstock_llm.services.worker.identity.model_identity import ServedWeights
from rootstock_llm.services.worker.loop.inbox import Action, Barrier, Command, LoopEnded, NotIdle, Pace

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 3600.0  # largest time limit of a call in seconds, and the time limit of calls without a deadline
# Seconds by which a command's deadline is earlier than the deadline of its call. In this time, the client gets the error of a
# command that has missed its deadline. For calls with a time limit below 5 s, a tenth of the limit is used instead.
RESPONSE_S = 0.5
LOG_LEVELS = ("debug", "info", "warning", "error")

# The barrier of each operation by RPC name (table in docs/reference/control.md).
BARRIERS: Mapping[str, Barrier] = MappingProxyType(
    {
        # A flush may free pages that a step in flight still reads. This is safe, because a later step that overwrites these pages
        # runs on the same device stream, after the step in flight.
        "FlushCache": Barrier.NONE,
        "GetInternalState": Barrier.NONE,
        "SetInternalState": Barrier.NONE,
        "SlowDown": Barrier.NONE,
        "Pause": Barrier.DRAINED,  # when the operator gets the response, the device is idle
        "Continue": Barrier.NONE,
        "StartProfile": Barrier.DRAINED,
        "StopProfile": Barrier.DRAINED,
        "StartExpertDistributionRecord": Barrier.NONE,
        "StopExpertDistributionRecord": Barrier.DRAINED,  # the record then has the step that was in flight
        "DumpExpertDistributionRecord": Barrier.DRAINED,
        "FreezeGc": Barrier.NONE,
        "ReleaseMemory": Barrier.IDLE,  # the KV of requests is in the released memory
        "ResumeMemory": Barrier.DRAINED,
        "SetLogLevel": Barrier.NONE,
        "TraceRequest": Barrier.NONE,
    }
)


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Serves the control operations of one worker. Runs on the asyncio loop."""

    def __init__(
        self,
        put: Callable[[Command], None],
        worker_id: str,
        model: str,
        profiles: Profiles,
        clock: Callable[[], float] = time.monotonic,
        weights: ServedWeights | None = None,
        kv_peers: Callable[[], Sequence[PeerRate]] = tuple,
    ) -> None:
        """Stores the objects on which the operations act.

        Args:
            put: passes a command to the scheduler's loop; may be called on any thread.
            worker_id: name of the worker.
            model: name of the model.
            profiles: starts and stops profiles.
            clock: the scheduler loop's clock.
            weights: the served weights; None if the model has no revision.
            kv_peers: returns the remote workers whose KV this worker reads, with the measured rates.
        """
        self._put = put
        self._worker_id, self._model = worker_id, model
        self._profiles = profiles
        self._clock = clock
        self._weights, self._kv_peers = weights, kv_peers
        self._memory_control = MemoryControl(clock, weights)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: grpc.aio.ServicerContext) -> pb.FlushCacheResponse:
        salt = request.cache_salt if request.HasField("cache_salt") else None
        older_than_s = request.older_than_s if request.HasField("older_than_s") else None
        tiers = tuple(request.tiers)

        def act(control: SchedulerControl, executor: Executor, pace: Pace) -> Flushed:
            return flush(control, executor, parse(tiers, salt, older_than_s))

        flushed = await self._run("FlushCache", context, act)
        if flushed.stored is None:
            return pb.FlushCacheResponse(pages=flushed.pages)
        deleted = await self._deleted(flushed.stored, context)
        return pb.FlushCacheResponse(pages=flushed.pages + (0 if flushed.counted else deleted.pages))

    async def GetInternalState(self, request: pb.GetInternalStateRequest, context: grpc.aio.ServicerContext) -> pb.InternalState:
        return self._state_to_pb(await self._run("GetInternalState", context, self._snapshot))

    async def SetInternalState(self, request: pb.SetInternalStateRequest, context: grpc.aio.ServicerContext) -> pb.InternalState:
        def act(control: SchedulerControl, executor: Executor, pace: Pace) -> InternalState:
            changes = {name: value_from_pb(value) for name, value in request.tunables.items()}
            internal_state.retune(control, changes)
            return self._snapshot(control, executor, pace)

        return self._state_to_pb(await self._run("SetInternalState", context, act))

    async def SlowDown(self, request: pb.SlowDownRequest, context: grpc.aio.ServicerContext) -> pb.SlowDownResponse:
        delay = request.step_delay_s
        await self._run("SlowDown", context, lambda control, executor, pace: internal_state.slow_down(pace, delay))
        return pb.SlowDownResponse()

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseResponse:
        def act(control: SchedulerControl, executor: Executor, pace: Pace) -> None:
            self._memory_control.pause(control, PauseMode(_word(pb.PauseMode, request.mode, "mode")))

        await self._run("Pause", context, act)
        return pb.PauseResponse()

    async def Continue(self, request: pb.ContinueRequest, context: grpc.aio.ServicerContext) -> pb.ContinueResponse:
        await self._run("Continue", context, lambda control, executor, pace: self._memory_control.unpause(control))
        return pb.ContinueResponse()

    async def StartProfile(self, request: pb.StartProfileRequest, context: grpc.aio.ServicerContext) -> pb.StartProfileResponse:
        name = request.name
        path = await self._run("StartProfile", context, lambda control, executor, pace: self._profiles.start(executor, name))
        return pb.StartProfileResponse(path=str(path))

    async def StopProfile(self, request: pb.StopProfileRequest, context: grpc.aio.ServicerContext) -> pb.StopProfileResponse:
        path = await self._run("StopProfile", context, lambda control, executor, pace: self._profiles.stop(executor))
        return pb.StopProfileResponse(path=str(path))

    async def StartExpertDistributionRecord(
        self, request: pb.StartExpertDistributionRecordRequest, context: grpc.aio.ServicerContext
    ) -> pb.StartExpertDistributionRecordResponse:
        await self._run("StartExpertDistributionRecord", context, lambda control, executor, pace: expert_record.start(control))
        return pb.StartExpertDistributionRecordResponse()

    async def StopExpertDistributionRecord(
        self, request: pb.StopExpertDistributionRecordRequest, context: grpc.aio.ServicerContext
    ) -> pb.StopExpertDistributionRecordResponse:
        await self._run("StopExpertDistributionRecord", context, lambda control, executor, pace: expert_record.stop(control))
        return pb.StopExpertDistributionRecordResponse()

    async def DumpExpertDistributionRecord(
        self, request: pb.DumpExpertDistributionRecordRequest, context: grpc.aio.ServicerContext
    ) -> pb.DumpExpertDistributionRecordResponse:
        found: ExpertDistribution = await self._run(
            "DumpExpertDistributionRecord", context, lambda control, executor, pace: expert_record.dump(control)
        )
        return _distribution_to_pb(found)

    async def FreezeGc(self, request: pb.FreezeGcRequest, context: grpc.aio.ServicerContext) -> pb.FreezeGcResponse:
        objects = await self._run("FreezeGc", context, lambda control, executor, pace: _freeze_gc())
        return pb.FreezeGcResponse(objects=objects)

    async def ReleaseMemory(
        self, request: pb.ReleaseMemoryRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseMemoryResponse:
        def act(control: SchedulerControl, executor: Executor, pace: Pace) -> tuple[MemoryPart, ...]:
            self._memory_control.release(control, executor, _parts(request.tags))
            return self._memory_control.released

        return pb.ReleaseMemoryResponse(released=_tags(await self._run("ReleaseMemory", context, act)))

    async def ResumeMemory(self, request: pb.ResumeMemoryRequest, context: grpc.aio.ServicerContext) -> pb.ResumeMemoryResponse:
        def act(control: SchedulerControl, executor: Executor, pace: Pace) -> tuple[MemoryPart, ...]:
            self._memory_control.resume(control, executor, _parts(request.tags))
            return self._memory_control.released

        return pb.ResumeMemoryResponse(released=_tags(await self._run("ResumeMemory", context, act)))

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: grpc.aio.ServicerContext) -> pb.SetLogLevelResponse:
        level = request.level
        previous = await self._run("SetLogLevel", context, lambda control, executor, pace: _set_log_level(level))
        return pb.SetLogLevelResponse(previous=previous)

    async def TraceRequest(self, request: pb.TraceRequestRequest, context: grpc.aio.ServicerContext) -> pb.TraceRequestResponse:
        request_id = request.request_id
        events = await self._run("TraceRequest", context, lambda control, executor, pace: control.trace(request_id))
        rows = [pb.TraceEvent(at_s=e.at - events[0].at, kind=e.kind, detail=e.detail) for e in events]
        return pb.TraceRequestResponse(events=rows)

    async def _run(self, operation: str, context: grpc.aio.ServicerContext, action: Action) -> Any:
        """Runs an action on the scheduler loop's thread. Returns its result; if it raises, aborts the call with a gRPC status."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._put(Command(BARRIERS[operation], action, future, self._deadline(context)))
        try:
            result = await asyncio.wrap_future(future)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (NotIdle, OperationRefused) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except LoopEnded as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except Exception as error:
            logger.exception("operation failed", extra=fields(operation=operation))
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        logger.info("operation done", extra=fields(operation=operation, peer=context.peer()))
        return result

    async def _deleted(self, stored: concurrent.futures.Future[Deleted], context: grpc.aio.ServicerContext) -> Deleted:
        """Waits until the storage tier has deleted the selected pages. Aborts the call if pages remain or the deadline passes."""
        left = self._deadline(context) - self._clock()
        try:
            deleted = await asyncio.wait_for(asyncio.wrap_future(stored), max(left, 0.0))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the storage tier has not deleted all pages before the deadline; it continues"
            )
        except Exception as error:
            logger.exception("could not delete pages in the storage tier")
            await context.abort(grpc.StatusCode.INTERNAL, f"the storage tier could not delete the pages: {error}")
        if deleted.pending:
            text = f"the storage tier has not deleted all pages and will retry: {deleted.pending}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
        return deleted

    def _deadline(self, context: grpc.aio.ServicerContext) -> float:
        left = context.time_remaining()
        wait = LONGEST_WAIT_S if left is None else min(left, LONGEST_WAIT_S)
        return self._clock() + wait - min(RESPONSE_S, 0.1 * wait)

    def _snapshot(self, control: SchedulerControl, executor: Executor, pace: Pace) -> InternalState:
        return internal_state.snapshot(control, pace, self._memory_control, self._profiles)

    def _state_to_pb(self, state: InternalState) -> pb.InternalState:
        message = pb.InternalState(
            worker_id=self._worker_id,
            model=self._model,
            paused=state.paused,
            step_delay_s=state.step_delay_s,
            released=_tags(state.released),
            profile=str(state.profile or ""),
            revision=self._weights.identity.revision if self._weights is not None else "",
        )
        put_values(message.tunables, state.tunables)
        put_values(message.stats, state.stats)
        for peer in self._kv_peers():
            message.kv_peers.add(address=peer.address, transport=peer.transport, bytes_per_second=peer.bytes_s)
        return message


def _word(enum: Any, number: int, field: str) -> str:
    """Returns the name of an enum's value, in lower case and without the enum's prefix.

    Args:
        field: name of the request's field, for the error.

    Raises:
        ValueError: the value is unset or unknown.
    """
    names: dict[int, str] = {value: name for name, value in enum.items()}
    if not number or number not in names:
        known = ", ".join(enum_word(names[0], name) for value, name in names.items() if value)
        raise ValueError(f"{field}: must be one of {known}")
    return enum_word(names[0], names[number])


def _parts(tags: Iterable[int]) -> list[MemoryPart]:
    return [MemoryPart(_word(pb.MemoryTag, tag, "tags")) for tag in tags]


def _tags(parts: Iterable[MemoryPart]) -> list[pb.MemoryTag]:
    return [pb.MemoryTag.Value(f"MEMORY_TAG_{part.name}") for part in parts]


def _distribution_to_pb(found: ExpertDistribution) -> pb.DumpExpertDistributionRecordResponse:
    layers = zip(found.shape.layers, found.rows, strict=True)
    return pb.DumpExpertDistributionRecordResponse(
        recording=found.is_running,
        num_tokens=found.num_tokens,
        num_experts_per_tok=found.shape.num_chosen,
        logical_count=[pb.ExpertCounts(layer=layer, counts=counts.tolist()) for layer, counts in layers],
        balancedness=found.balancedness,
    )


def _freeze_gc() -> int:
    """Collects garbage, exempts all remaining objects from later collections and returns their number."""
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


def _set_log_level(level: str) -> str:
    """Sets the level of the root logger and returns the previous level. Raises ValueError for an unknown level."""
    if level not in LOG_LEVELS:
        raise ValueError(f"level: must be one of {', '.join(LOG_LEVELS)}")
    root = logging.getLogger()
    previous = logging.getLevelName(root.level).lower()
    root.setLevel(level.upper())
    return previous
