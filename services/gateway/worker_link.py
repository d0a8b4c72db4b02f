"""The gateway's stream to one worker: submits and aborts go out in one message per event-loop tick, steps come in.

Owns which choices are open on the worker. Knows nothing of what they mean: that is the LinkEvents' part. When the stream
breaks, the worker aborts what came over it, and the open choices are handed back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import grpc

from rootstock.v1 import worker_pb2, worker_pb2_grpc
from services.gateway.reconnect import Duplex, StreamBroken, keep_connected
from services.shared import rpc
from services.shared.log import fields

if TYPE_CHECKING:
    from services.gateway.request_state import Choice

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20  # of submits in one message: far below what gRPC accepts, for a burst of long prompts is large

Call = Duplex[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class LinkEvents(Protocol):
    """Called on the event loop; must not block."""

    def on_hello(self, link: WorkerLink) -> None:
        """The link is connected and its `info` is of this session."""

    def on_step(self, link: WorkerLink, step: worker_pb2.StepOutput) -> None: ...

    def on_down(self, link: WorkerLink, orphans: list[Choice]) -> None:
        """The session is over; `orphans` were open on it."""


class WorkerLink:
    def __init__(self, address: str, events: LinkEvents) -> None:
        self.address = address
        self.info: worker_pb2.WorkerInfo | None = None  # None: not connected
        self.draining = False  # it said that it is going away; until its next hello
        self.open: dict[int, Choice] = {}
        self.last_pick = 0
        self._events = events
        self._submits: dict[int, worker_pb2.Submit] = {}
        self._aborts: list[int] = []
        self._wake = asyncio.Event()

    def submit(self, choice: Choice, message: worker_pb2.Submit) -> None:
        self.open[message.handle] = choice
        self._submits[message.handle] = message
        self._wake.set()

    def abort(self, handle: int) -> None:
        """Forgets the choice: whatever the worker still says of it is dropped."""
        if self.open.pop(handle, None) is None:
            return
        if self._submits.pop(handle, None) is None:
            self._aborts.append(handle)
            self._wake.set()

    async def run(self) -> None:
        channel = rpc.channel(self.address)
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            await keep_connected("worker", self.address, lambda: self._session(stub.Generate(wait_for_ready=True)))
        finally:
            await channel.close()

    async def _session(self, call: Call) -> None:
        writer: asyncio.Task[None] | None = None
        try:
            first = await self._read(call)
            if not first.HasField("hello"):
                raise StreamBroken("the first message is no hello")
            self.info, self.draining = first.hello, False
            logger.info("worker connected", extra=fields(address=self.address, worker=self.info.worker_id, model=self.info.model))
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            self._events.on_hello(self)
            while True:
                self._events.on_step(self, (await self._read(call)).step)
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()
            self._reset()

    def _reset(self) -> None:
        orphans = list(self.open.values())
        self.info = None
        self.open.clear()
        self._submits.clear()
        self._aborts.clear()
        self._events.on_down(self, orphans)

    @staticmethod
    async def _read(call: Call) -> worker_pb2.GenerateResponse:
        message = await call.read()
        if not isinstance(message, worker_pb2.GenerateResponse):
            raise StreamBroken("ended by peer")
        return message

    def _next_message(self) -> worker_pb2.GenerateRequest:
        """All aborts, and submits up to about MESSAGE_BYTES, the first one in any case."""
        message = worker_pb2.GenerateRequest(aborts=self._aborts)
        self._aborts.clear()
        size = 0
        while self._submits and size < MESSAGE_BYTES:
            submit = self._submits.pop(next(iter(self._submits)))
            size += submit.ByteSize()
            message.submits.append(submit)
        return message

    async def _write(self, call: Call) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._submits or self._aborts:
                    await call.write(self._next_message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, with its reason
