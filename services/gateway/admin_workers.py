"""The workers' control services as the admin API sees them: every call goes to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from rootstock.v1 import control_pb2_grpc
from services.shared import rpc
from services.shared.control_token import authorization
from services.shared.control_values import as_json


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """One worker's answer. code: None where it did what was asked; else why it did not, and message says it in words."""

    worker: str
    result: dict[str, Any]
    code: grpc.StatusCode | None = None
    message: str = ""

    def body(self) -> dict[str, Any]:
        if self.code is None:
            return {"worker": self.worker, "ok": True, "result": self.result}
        return {"worker": self.worker, "ok": False, "error": {"code": self.code.name, "message": self.message}}


class ControlledWorkers:
    """Built inside the loop that uses it. addresses: of control services, host:port. token: "" for none."""

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        self._channels = {address: rpc.channel(address) for address in addresses}
        self._stubs = {
            address: control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
            for address, channel in self._channels.items()
        }
        self._metadata = (("authorization", authorization(token)),) if token else ()

    async def ask(self, rpc_name: str, request: Message, timeout_s: float) -> list[WorkerAnswer]:
        """One answer for each worker, in the order of their addresses. Raises nothing: what fails is in the answers."""
        asked = (self._ask(address, rpc_name, request, timeout_s) for address in self._stubs)
        return list(await asyncio.gather(*asked))

    async def _ask(self, address: str, rpc_name: str, request: Message, timeout_s: float) -> WorkerAnswer:
        call = getattr(self._stubs[address], rpc_name)
        try:
            response = await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return WorkerAnswer(address, {}, error.code(), error.details() or "")
        return WorkerAnswer(address, as_json(response))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
