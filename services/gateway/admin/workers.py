"""The workers' control services as the admin API sees them: every call goes to all that are meant at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from rootstock.v1 import control_pb2_grpc
from services.gateway.admin.worker_directory import KnownWorker
from services.shared.control_values import as_json
from services.shared.rpc.control_token import authorization
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer
from services.shared.tls.roles import Role


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """One worker's answer. code: None where it did what was asked; else why it did not, and message says it in words."""

    worker: KnownWorker
    result: dict[str, Any]
    code: grpc.StatusCode | None = None
    message: str = ""

    def body(self) -> dict[str, Any]:
        if self.code is None:
            return {**self.worker.names, "ok": True, "result": self.result}
        return {**self.worker.names, "ok": False, "error": {"code": self.code.name, "message": self.message}}


class ControlledWorkers:
    """token: "" for none. Each call has a connection of its own: they are rare."""

    def __init__(self, token: str, dialer: Dialer = IN_THE_CLEAR) -> None:
        self._dialer = dialer
        self._metadata = (("authorization", authorization(token)),) if token else ()

    async def ask(self, workers: Sequence[KnownWorker], rpc_name: str, request: Message, timeout_s: float) -> list[WorkerAnswer]:
        """One answer for each worker, in their order. Raises nothing: what fails is in the answers."""
        return list(await asyncio.gather(*(self._ask(worker, rpc_name, request, timeout_s) for worker in workers)))

    async def _ask(self, worker: KnownWorker, rpc_name: str, request: Message, timeout_s: float) -> WorkerAnswer:
        if not worker.control:
            return WorkerAnswer(worker, {}, grpc.StatusCode.UNAVAILABLE, worker.why)
        async with self._dialer.channel(worker.control, Role.WORKER) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            try:
                response = await getattr(stub, rpc_name)(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                return WorkerAnswer(worker, {}, error.code(), error.details() or "")
            return WorkerAnswer(worker, as_json(response))
