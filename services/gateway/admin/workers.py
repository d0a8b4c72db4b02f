"""Finds workers by the names that operators use, and calls their control services."""

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

RETRY_AFTER_S = 1  # seconds after which a client retries while no worker is known


class Workers(Protocol):
    """The workers that discovery has found, as the fleet keeps them."""

    @property
    def links(self) -> Mapping[str, AnyLink]:
        """The link to each worker, by address."""

    def pool_of(self, link: AnyLink) -> ModelPool[Any] | None:
        """Returns the pool of the worker's model, or None while the worker is not connected."""


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker, with the address of its control service."""

    worker_id: str  # "" until the worker has been connected
    address: str  # address of its gRPC port, or "" if only its control service is configured
    control: str  # address of the control service; "" if it is unknown or off
    why: str = ""  # reason for which `control` is empty
    link: AnyLink | None = None  # None if only its control service is configured
    pool: ModelPool[Any] | None = None  # pool of the model, or None while the worker is not connected

    def is_called(self, name: str) -> bool:
        """Returns whether `name` is its id or one of its addresses."""
        return name in (self.worker_id, self.address, self.control)

    @property
    def names(self) -> dict[str, str]:
        """The worker's id and address, as response bodies have them."""
        address = self.address or self.control
        return {"worker": self.worker_id or address, "address": address}

    @property
    def is_read_by_others(self) -> bool:
        """Whether other workers read the KV of prompts that it computes."""
        return self.link is not None and self.link.info is not None and self.link.info.role == PREFILL

    @property
    def load(self) -> dict[str, Any] | None:
        """The latest load report and the status at this gateway, or None while the worker is not connected."""
        link, pool = self.link, self.pool
        if link is None or link.info is None or pool is None:
            return None
        seen = {"model": pool.model.name, "usable": link in pool.usable(), "open_here": len(link.open)}
        limits = {"max_running_requests": link.info.max_running_requests, "context_len": link.info.context_len}
        return {**seen, **limits, **(as_json(link.load) if link.load is not None else {})}


class WorkerDirectory:
    """Finds workers by the names that operators use. Each process has one."""

    def __init__(self, workers: Workers, controls: Sequence[str]) -> None:
        """Creates a directory.

        Args:
            controls: Configured addresses of control services. If empty, each worker reports its control port, and the host is
                that of its gRPC address.
        """
        self._workers = workers
        self._controls = controls

    def find(self, name: str | None) -> list[KnownWorker]:
        """Finds workers.

        Args:
            name: A worker's id or address, or None for all workers.

        Raises:
            ApiError: No worker has this name (404), or no worker is known (503).
        """
        known = self._known()
        found = [worker for worker in known if name is None or worker.is_called(name)]
        if found:
            return found
        if name is None:
            raise unavailable("No worker is known.", RETRY_AFTER_S, "no_worker")
        names = ", ".join(worker.names["worker"] for worker in known)
        raise ApiError(404, f"No worker has this id or address. Known workers: {names}.", param="worker", code="worker_not_found")

    def _known(self) -> list[KnownWorker]:
        linked = [_of(link, self._workers.pool_of(link)) for link in self._workers.links.values()]
        if not self._controls:
            return sorted(linked, key=lambda worker: (worker.worker_id, worker.address))
        by_control = {worker.control: worker for worker in linked if worker.control}
        return [by_control.get(control) or KnownWorker("", "", control) for control in self._controls]


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of an operation on one worker."""

    worker: KnownWorker
    response: dict[str, Any]  # the control service's response as JSON; empty after a failure
    code: grpc.StatusCode | None = None  # None if the operation succeeded
    message: str = ""  # reason of the failure

    def body(self) -> dict[str, Any]:
        """Returns the worker's entry in the body of the HTTP response."""
        if self.code is None:
            return {**self.worker.names, "ok": True, "result": self.response}
        return {**self.worker.names, "ok": False, "error": {"code": self.code.name, "message": self.message}}


class ControlledWorkers:
    """Calls the workers' control services, several workers concurrently. Each call opens a connection, because calls are rare."""

    def __init__(self, token: str, dialer: Dialer = PLAINTEXT) -> None:
        """Prepares the calls. If the token is empty, calls have no `authorization`."""
        self._dialer = dialer
        self._metadata = (("authorization", authorization(token)),) if token else ()

    async def ask(self, workers: Sequence[KnownWorker], rpc_name: str, request: Message, timeout_s: float) -> list[WorkerResult]:
        """Returns one result per worker, in the order of `workers`. A failed call raises nothing; its result has a code."""
        return list(await asyncio.gather(*(self._ask(worker, rpc_name, request, timeout_s) for worker in workers)))

    async def _ask(self, worker: KnownWorker, rpc_name: str, request: Message, timeout_s: float) -> WorkerResult:
        if not worker.control:
            return WorkerResult(worker, {}, grpc.StatusCode.UNAVAILABLE, worker.why)
        async with self._dialer.channel(worker.control, Role.WORKER) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            try:
                response = await getattr(stub, rpc_name)(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                return WorkerResult(worker, {}, error.code(), error.details() or "")
            return WorkerResult(worker, as_json(response))


def _of(link: AnyLink, pool: ModelPool[Any] | None) -> KnownWorker:
    info = link.info or link.last_info
    if info is None:
        return KnownWorker("", link.address, "", "it has never been connected", link, pool)
    if not info.control_port:
        return KnownWorker(info.worker_id, link.address, "", "its control service is off (control_port)", link, pool)
    host = link.address.rpartition(":")[0]
    return KnownWorker(info.worker_id, link.address, f"{host}:{info.control_port}", link=link, pool=pool)
