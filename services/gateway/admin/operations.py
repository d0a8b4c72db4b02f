"""Executes the requests of the admin port: operations of the workers' control services, load reports and aborts.

A request is for all workers or for one worker, and its response has one result per worker. The response to an abort has counts
and the gateways that could not be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from rootstock_llm.services.gateway.admin import bodies
from rootstock_llm.services.gateway.admin.bodies import Abort, AdminBody, ControlBody, Load, SelectedPages
from rootstock_llm.services.gateway.admin.workers import ControlledWorkers, WorkerDirectory, WorkerResult
from rootstock_llm.services.gateway.generation.abort import Aborter, AbortScope
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request


class AdminResult(NamedTuple):
    """The response to a request of the admin port."""

    status: int  # HTTP status
    body: dict[str, Any]  # JSON body


@dataclass(frozen=True, slots=True)
class AdminOperation:
    """An operation of the admin port, by the RPC that executes it and the type of its body."""

    rpc: str  # method of the workers' control service; "" if the gateway itself executes the request
    body: type[AdminBody]  # type of the HTTP request's body


_STATE = AdminOperation("GetInternalState", bodies.GetInternalState)
CONTROL: Mapping[tuple[str, str], AdminOperation] = {
    ("POST", "/flush_cache"): AdminOperation("FlushCache", bodies.FlushCache),
    ("POST", "/clear_hicache_storage_backend"): AdminOperation("FlushCache", bodies.ClearStorage),
    ("GET", "/get_server_info"): _STATE,
    ("GET", "/server_info"): _STATE,
    ("GET", "/set_internal_state"): _STATE,
    ("POST", "/set_internal_state"): AdminOperation("SetInternalState", bodies.SetInternalState),
    ("POST", "/slow_down"): AdminOperation("SlowDown", bodies.SlowDown),
    ("POST", "/pause_generation"): AdminOperation("Pause", bodies.Pause),
    ("POST", "/continue_generation"): AdminOperation("Continue", bodies.Continue),
    ("POST", "/start_profile"): AdminOperation("StartProfile", bodies.StartProfile),
    ("POST", "/stop_profile"): AdminOperation("StopProfile", bodies.StopProfile),
    ("POST", "/start_expert_distribution_record"): AdminOperation(
        "StartExpertDistributionRecord", bodies.StartExpertDistributionRecord
    ),
    ("POST", "/stop_expert_distribution_record"): AdminOperation(
        "StopExpertDistributionRecord", bodies.StopExpertDistributionRecord
    ),
    ("POST", "/dump_expert_distribution_record"): AdminOperation(
        "DumpExpertDistributionRecord", bodies.DumpExpertDistributionRecord
    ),
    ("POST", "/freeze_gc"): AdminOperation("FreezeGc", bodies.FreezeGc),
    ("POST", "/release_memory_occupation"): AdminOperation("ReleaseMemory", bodies.ReleaseMemory),
    ("POST", "/resume_memory_occupation"): AdminOperation("ResumeMemory", bodies.ResumeMemory),
    ("POST", "/configure_logging"): AdminOperation("SetLogLevel", bodies.SetLogLevel),
    ("POST", "/trace_request"): AdminOperation("TraceRequest", bodies.TraceRequest),
}
_LOAD = AdminOperation("", Load)
ROUTES: Mapping[tuple[str, str], AdminOperation] = {
    **CONTROL,
    ("GET", "/get_load"): _LOAD,
    ("GET", "/v1/loads"): _LOAD,
    ("POST", "/abort_request"): AdminOperation("", Abort),
}


class AdminOperations:
    """Executes the requests of the admin port. Each process has one instance."""

    def __init__(
        self,
        directory: WorkerDirectory,
        workers: ControlledWorkers,
        aborter: Aborter,
        timeout_s: float,
        salts_by_key: bool = False,
    ) -> None:
        """Prepares to execute operations.

        Args:
            timeout_s: Seconds for an operation on one worker, if the request has no timeout.
            salts_by_key: Value of the setting salt_cache_by_key.
        """
        self._directory = directory
        self._workers = workers
        self._aborter = aborter
        self._timeout_s = timeout_s
        self._salts_by_key = salts_by_key

    async def run(self, operation: AdminOperation, body: AdminBody) -> AdminResult:
        """Executes one request. Raises ApiError if the request is invalid, or names a worker that discovery has not found."""
        if isinstance(body, ControlBody):
            return await self._control(operation.rpc, body)
        return await self._abort(body) if isinstance(body, Abort) else self._load(body)

    async def _control(self, rpc: str, body: ControlBody) -> AdminResult:
        if isinstance(body, SelectedPages):
            self._check_key(body)
        workers, request, timeout_s = self._directory.find(body.worker), body.request(), body.timeout_s or self._timeout_s
        if not isinstance(body, SelectedPages):
            return _result(await self._workers.call(workers, rpc, request, timeout_s))
        # Prefill workers flush first. Otherwise, a decode worker that has flushed could read the same pages from a prefill
        # worker again.
        first = [worker for worker in workers if worker.is_read_by_others]
        rest = [worker for worker in workers if not worker.is_read_by_others]
        return _result([each for group in (first, rest) for each in await self._workers.call(group, rpc, request, timeout_s)])

    def _check_key(self, body: SelectedPages) -> None:
        """Checks that `api_key` fits the setting salt_cache_by_key. Raises ApiError.

        Without the setting, `api_key` is not allowed. With the setting, a salt requires `api_key`.
        """
        if body.api_key is not None and not self._salts_by_key:
            raise bad_request(
                "api_key", "'api_key' requires --salt-cache-by-key. Without this flag, all API keys share cached prefixes."
            )
        salted = body.cache_salt is not None or body.extra_key is not None
        if salted and body.api_key is None and self._salts_by_key:
            raise bad_request(
                "api_key", "'api_key' is required with a salt, because --salt-cache-by-key gives each API key its own salts."
            )

    def _load(self, body: AdminBody) -> AdminResult:
        disconnected = (grpc.StatusCode.UNAVAILABLE, "the worker is not connected to this gateway")
        loads = [(worker, worker.load) for worker in self._directory.find(body.worker)]
        return _result(
            [WorkerResult(worker, load) if load else WorkerResult(worker, {}, *disconnected) for worker, load in loads]
        )

    async def _abort(self, body: Abort) -> AdminResult:
        worker_id = self._directory.find(body.worker)[0].worker_id if body.worker is not None else ""
        if body.worker is not None and not worker_id:
            message = "This gateway has never been connected to the worker and does not know its id. Name the worker by its id."
            raise ApiError(409, message, param="worker", code="worker_unknown")
        report = await self._aborter.abort(AbortScope(None if body.abort_all else body.rid, None, worker_id))
        unreached = [{"gateway": peer.address, "message": peer.message} for peer in report.unreached]
        content = {"success": not unreached, **report.body(), "unreached": unreached}
        return AdminResult(502 if unreached else 200, content)


def _result(results: Sequence[WorkerResult]) -> AdminResult:
    status = _status(results)
    return AdminResult(status, {"success": status == 200, "workers": [each.body() for each in results]})


def _status(results: Sequence[WorkerResult]) -> int:
    """Returns the HTTP status for the worst result; see the table in routes.py."""
    codes = {each.code for each in results} - {None}
    if not codes:
        return 200
    if codes - {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}:
        return 502
    return 409 if grpc.StatusCode.FAILED_PRECONDITION in codes else 400
