"""Finds workers by id or address, and calls their control services."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from rootstock_llm.protos import control_pb2_grpc
from rootstock_llm.services.gateway.dispatch.model_pool import PREFILL, AnyLink, ModelPool
from rootstock_llm.services.gateway.generation.errors import ApiError, unavailable
from rootstock_llm.services.shared.control_values import as_json
from rootstock_llm.services.shared.rpc.control_token import authorization
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer
from rootstock_llm.services.shared.tls.roles import Role

RETRY_AFTER_S = 1  # value of the Retry-After header while discovery has found no worker


class Workers(Protocol):
    """The workers that discovery has found. The fleet implements this interface."""

    @property
    def links(self) -> Mapping[str, AnyLink]:
        """The link to each worker, by the worker's gRPC address."""

    def pool_of(self, link: AnyLink) -> ModelPool[Any] | None:
        """Returns the pool of the worker's model, or None while the worker is not connected."""


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker that discovery has found, or whose control service is configured."""

    worker_id: str  # "" until the worker has been connected
    address: str  # address of its gRPC port, or "" if only its control service is configured
    control: str  # address of the control service; "" if it is unknown or off
    no_control_reason: str = ""  # reason for which `control` is empty
    link: AnyLink | None = None  # link to the worker, or None if only its control service is configured
    pool: ModelPool[Any] | None = None  # pool of the model, or None while the worker is not connected

    def has_name(self, name: str) -> bool:
        """Returns whether `name` is the worker's id or one of its addresses."""
        return name in (self.worker_id, self.address, self.control)

    @property
    def names(self) -> dict[str, str]:
        """The fields `worker` and `address` of response bodies. A worker without a known id is named by its address."""
        address = self.address or self.control
        return {"worker": self.worker_id or address, "address": address}

    @property
    def is_read_by_others(self) -> bool:
        """Whether the worker is a prefill worker, so that other workers read its KV pages."""
        return self.link is not None and self.link.info is not None and self.link.info.role == PREFILL

    @property
    def load(self) -> dict[str, Any] | None:
        """The worker's last load report, and its status at this gateway. None while the worker is not connected."""
        link, pool = self.link, self.pool
        if link is None or link.info is None or pool is None:
            return None
        seen = {"model": pool.model.name, "usable": link in pool.usable(), "open_here": len(link.open)}
        limits = {"max_running_requests": link.info.max_running_requests, "context_len": link.info.context_len}
        return {**seen, **limits, **(as_json(link.load) if link.load is not None else {})}


class WorkerDirectory:
    """Finds workers by id or address. Each process has one instance."""

    def __init__(self, workers: Workers, controls: Sequence[str]) -> None:
        """Makes the directory.

        Args:
            controls: Configured addresses of control services. If empty, a control service has the host of the worker's gRPC
                address and the port that the worker reports.
        """
        self._workers = workers
        self._controls = controls

    def find(self, name: str | None) -> list[KnownWorker]:
        """Finds workers.

        Args:
            name: A worker's id or address, or None for all workers.

        Raises:
            ApiError: No worker has this name (404), or `name` is None and no worker is known (503).
        """
        known = self._known()
        found = [worker for worker in known if name is None or worker.has_name(name)]
        if found:
            return found
        if name is None:
            raise unavailable("Discovery has found no worker yet.", RETRY_AFTER_S, "no_worker")
        names = ", ".join(worker.names["worker"] for worker in known)
        raise ApiError(404, f"No worker has this id or address. Known workers: {names}.", param="worker", code="worker_not_found")

    def _known(self) -> list[KnownWorker]:
        linked = [_known_worker(link, self._workers.pool_of(link)) for link in self._workers.links.values()]
        if not self._controls:
            return sorted(linked, key=lambda worker: (worker.worker_id, worker.address))
        by_control = {worker.control: worker for worker in linked if worker.control}
        return [by_control.get(control) or KnownWorker("", "", control) for control in self._controls]


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of an operation on one worker."""

    worker: KnownWorker
    response: dict[str, Any]  # the control service's response as JSON; empty after a failure
    code: grpc.StatusCode | None = None  # status code of the failure, or None if the operation succeeded
    message: str = ""  # reason of the failure

    def body(self) -> dict[str, Any]:
        """Returns the worker's entry in the body of the HTTP response."""
        if self.code is None:
            return {**self.worker.names, "ok": True, "result": self.response}
        return {**self.worker.names, "ok": False, "error": {"code": self.code.name, "message": self.message}}


class ControlledWorkers:
    """Calls the workers' control services. Each call opens a connection, because calls are rare."""

    def __init__(self, token: str, dialer: Dialer = PLAINTEXT) -> None:
        """Prepares the calls. If the token is empty, calls have no `authorization`."""
        self._dialer = dialer
        self._metadata = (("authorization", authorization(token)),) if token else ()

    async def call(self, workers: Sequence[KnownWorker], rpc_name: str, request: Message, timeout_s: float) -> list[WorkerResult]:
        """Calls all workers concurrently.

        Returns one result per worker, in the order of `workers`. The result of a failed call has a code.
        """
        return list(await asyncio.gather(*(self._call(worker, rpc_name, request, timeout_s) for worker in workers)))

    async def _call(self, worker: KnownWorker, rpc_name: str, request: Message, timeout_s: float) -> WorkerResult:
        if not worker.control:
            return WorkerResult(worker, {}, grpc.StatusCode.UNAVAILABLE, worker.no_control_reason)
        async with self._dialer.channel(worker.control, Role.WORKER) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            try:
                response = await getattr(stub, rpc_name)(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                return WorkerResult(worker, {}, error.code(), error.details() or "")
            return WorkerResult(worker, as_json(response))


def _known_worker(link: AnyLink, pool: ModelPool[Any] | None) -> KnownWorker:
    info = link.info or link.last_info
    if info is None:
        return KnownWorker(
            "",
            link.address,
            "",
            "the worker has never been connected to this gateway, so its control port is unknown",
            link,
            pool,
        )
    if not info.control_port:
        return KnownWorker(
            info.worker_id,
            link.address,
            "",
            "the control service of the worker is off: its setting control_port is 0",
            link,
            pool,
        )
    host = link.address.rpartition(":")[0]
    return KnownWorker(info.worker_id, link.address, f"{host}:{info.control_port}", link=link, pool=pool)
