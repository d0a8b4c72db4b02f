"""What operators can do, over the whole fleet or on one worker: the control service's operations, loads, aborts.

Each answers with a status and a body that says of every worker, or gateway, what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.admin import bodies as bodies
from services.gateway.admin.bodies import Abort, AdminBody, ControlBody, Load, SelectedPages
from services.gateway.admin.worker_directory import WorkerDirectory
from services.gateway.admin.workers import ControlledWorkers, WorkerAnswer
from services.gateway.request.abort import Aborter, AbortScope
from services.gateway.request.errors import ApiError, bad_request

Answer = tuple[int, dict[str, Any]]  # HTTP status, body


@dataclass(frozen=True, slots=True)
class Operation:
    """rpc: the control service's method, "" where workers are not asked. body: what the HTTP request may hold."""

    rpc: str
    body: type[AdminBody]


_STATE = Operation("GetInternalState", bodies.GetInternalState)
CONTROL: Mapping[tuple[str, str], Operation] = {
    ("POST", "/flush_cache"): Operation("FlushCache", bodies.FlushCache),
    ("POST", "/clear_hicache_storage_backend"): Operation("FlushCache", bodies.ClearStorage),
    ("GET", "/get_server_info"): _STATE,
    ("GET", "/server_info"): _STATE,
    ("GET", "/set_internal_state"): _STATE,
    ("POST", "/set_internal_state"): Operation("SetInternalState", bodies.SetInternalState),
    ("POST", "/slow_down"): Operation("SlowDown", bodies.SlowDown),
    ("POST", "/pause_generation"): Operation("Pause", bodies.Pause),
    ("POST", "/continue_generation"): Operation("Continue", bodies.Continue),
    ("POST", "/start_profile"): Operation("StartProfile", bodies.StartProfile),
    ("POST", "/stop_profile"): Operation("StopProfile", bodies.StopProfile),
    ("POST", "/freeze_gc"): Operation("FreezeGc", bodies.FreezeGc),
    ("POST", "/release_memory_occupation"): Operation("ReleaseMemory", bodies.ReleaseMemory),
    ("POST", "/resume_memory_occupation"): Operation("ResumeMemory", bodies.ResumeMemory),
    ("POST", "/configure_logging"): Operation("SetLogLevel", bodies.SetLogLevel),
    ("POST", "/trace_request"): Operation("TraceRequest", bodies.TraceRequest),
}
_LOAD = Operation("", Load)
ROUTES: Mapping[tuple[str, str], Operation] = {
    **CONTROL,
    ("GET", "/get_load"): _LOAD,
    ("GET", "/v1/loads"): _LOAD,
    ("POST", "/abort_request"): Operation("", Abort),
}


class Operations:
    """timeout_s: of an operation on one worker, where the request names none. salts_by_key: see salt_cache_by_key."""

    def __init__(
        self,
        directory: WorkerDirectory,
        workers: ControlledWorkers,
        aborter: Aborter,
        timeout_s: float,
        salts_by_key: bool = False,
    ) -> None:
        self._directory = directory
        self._workers = workers
        self._aborter = aborter
        self._timeout_s = timeout_s
        self._salts_by_key = salts_by_key

    async def run(self, operation: Operation, body: AdminBody) -> Answer:
        """Raises ApiError."""
        if isinstance(body, ControlBody):
            return await self._control(operation.rpc, body)
        return await self._abort(body) if isinstance(body, Abort) else self._load(body)

    async def _control(self, rpc: str, body: ControlBody) -> Answer:
        if isinstance(body, SelectedPages):
            self._check_key(body)
        meant, request, timeout_s = self._directory.find(body.worker), body.request(), body.timeout_s or self._timeout_s
        if not isinstance(body, SelectedPages):
            return _answer(await self._workers.ask(meant, rpc, request, timeout_s))
        # Whoever has forgotten is not to read it anew from a worker that has not yet.
        first = [worker for worker in meant if worker.is_read_by_others]
        rest = [worker for worker in meant if not worker.is_read_by_others]
        return _answer([answer for some in (first, rest) for answer in await self._workers.ask(some, rpc, request, timeout_s)])

    def _check_key(self, body: SelectedPages) -> None:
        """A salt is one with the key that it came with, where keys are parted, and one without elsewhere. Raises ApiError."""
        if body.api_key is not None and not self._salts_by_key:
            raise bad_request("api_key", "api_key: Keys share cached prefixes here; --salt-cache-by-key parts them.")
        salted = body.cache_salt is not None or body.extra_key is not None
        if salted and body.api_key is None and self._salts_by_key:
            raise bad_request("api_key", "api_key: Each key has salts of its own here (--salt-cache-by-key): name the key too.")

    def _load(self, body: AdminBody) -> Answer:
        away = (grpc.StatusCode.UNAVAILABLE, "it is not connected to this gateway")
        found = [(worker, worker.load) for worker in self._directory.find(body.worker)]
        return _answer([WorkerAnswer(worker, load) if load else WorkerAnswer(worker, {}, *away) for worker, load in found])

    async def _abort(self, body: Abort) -> Answer:
        worker_id = self._directory.find(body.worker)[0].worker_id if body.worker is not None else ""
        if body.worker is not None and not worker_id:
            message = "This gateway has not met that worker, so that it does not know its id: name it by that."
            raise ApiError(409, message, param="worker", code="worker_unknown")
        report = await self._aborter.abort(AbortScope(None if body.abort_all else body.rid, None, worker_id))
        unreached = [{"gateway": peer.address, "message": peer.message} for peer in report.unreached]
        done = {"success": not unreached, **report.body(), "unreached": unreached}
        return (502 if unreached else 200), done


def _answer(answers: Sequence[WorkerAnswer]) -> Answer:
    status = _status(answers)
    return status, {"success": status == 200, "workers": [answer.body() for answer in answers]}


def _status(answers: Sequence[WorkerAnswer]) -> int:
    """The worst of the workers' answers, as one HTTP status."""
    codes = {answer.code for answer in answers} - {None}
    if not codes:
        return 200
    if codes - {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}:
        return 502
    return 409 if grpc.StatusCode.FAILED_PRECONDITION in codes else 400
