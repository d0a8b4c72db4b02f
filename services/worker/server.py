"""The Worker service: one long-lived stream per front end, one StepOutput per scheduler step on it.

Threads: gRPC runs on the asyncio loop; the scheduler's loop hands outputs over with `StreamOutbox.send`. When a stream
ends, however it ends, PeerGone goes to the inbox and the scheduler frees everything that came over it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable

import grpc

from rootstock.v1 import worker_pb2, worker_pb2_grpc
from services.shared.limits import MAX_SESSION_ID_CHARS
from services.shared.log import fields
from services.worker.core.messages import PeerOutput, StepOutput
from services.worker.inbox import Abort, CloseSession, Inbox, OpenSession, PeerGone
from services.worker.wire import InvalidRequest, ModelLimits, output_to_pb, refusal_to_pb, submit_from_pb

logger = logging.getLogger(__name__)


class ProtocolError(Exception):
    """A front end broke the contract; its stream ends, and with it all that came over it."""


class PeerStream:
    """Messages on their way to one front end. While the front end is slow they merge, so memory follows requests, not steps."""

    def __init__(self) -> None:
        self._pending: worker_pb2.StepOutput | None = None
        self._ready = asyncio.Event()
        self.open: set[int] = set()

    def opened(self, handle: int) -> None:
        """A request has come; it is open until its terminal output. Raises ProtocolError if the handle is open already."""
        if handle in self.open:
            raise ProtocolError(f"handle {handle} is in use")
        self.open.add(handle)

    def put(self, message: worker_pb2.StepOutput) -> None:
        if self._pending is None:
            self._pending = message
        else:
            self._pending.MergeFrom(message)
        self._ready.set()

    async def take(self) -> worker_pb2.StepOutput:
        await self._ready.wait()
        self._ready.clear()
        message, self._pending = self._pending, None
        assert message is not None
        return message


class StreamOutbox:
    """The loop's way out. Outputs for a front end that has gone are dropped: nobody is there to hear them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[int, PeerStream] = {}
        self._left = asyncio.Event()

    async def wait_empty(self) -> None:
        """Returns when no request's terminal output is still to come."""
        while self.num_open:
            self._left.clear()
            await self._left.wait()

    def open(self, peer: int) -> PeerStream:
        stream = self._streams[peer] = PeerStream()
        return stream

    def close(self, peer: int) -> None:
        del self._streams[peer]
        self._left.set()

    @property
    def num_open(self) -> int:
        """Requests whose terminal output is still to come, over all front ends."""
        return sum(len(stream.open) for stream in self._streams.values())

    def send(self, output: StepOutput) -> None:
        """From the loop's thread."""
        self._loop.call_soon_threadsafe(self._deliver, output.peers)

    def _deliver(self, peers: tuple[PeerOutput, ...]) -> None:
        for output in peers:
            if stream := self._streams.get(output.peer):
                stream.open.difference_update(finish.handle for finish in output.finishes)
                self._left.set()
                stream.put(output_to_pb(output))


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """on_arrival(peer, handle) is called for each request before the scheduler can see it."""

    def __init__(
        self,
        inbox: Inbox,
        outbox: StreamOutbox,
        info: worker_pb2.WorkerInfo,
        model: ModelLimits,
        on_arrival: Callable[[int, int], None],
    ) -> None:
        self._on_arrival = on_arrival
        self._inbox = inbox
        self._outbox = outbox
        self._info = info
        self._model = model
        self._peers = itertools.count(1)

    async def Generate(
        self, request_iterator: AsyncIterator[worker_pb2.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        peer = next(self._peers)
        stream = self._outbox.open(peer)
        reader = asyncio.create_task(self._read(request_iterator, peer, stream))
        taking: asyncio.Task[worker_pb2.StepOutput] | None = None
        logger.info("front end connected", extra=fields(peer=peer, address=context.peer()))
        try:
            yield worker_pb2.GenerateResponse(hello=self._info)
            while not reader.done():
                taking = asyncio.create_task(stream.take())
                await asyncio.wait((taking, reader), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    break
                yield worker_pb2.GenerateResponse(step=taking.result())
            await reader
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.cancel()
            if taking is not None:
                taking.cancel()
            self._outbox.close(peer)
            self._inbox.put(PeerGone(peer))
            logger.info("front end gone", extra=fields(peer=peer))

    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.OpenSessionResponse:
        if len(request.session_id) > MAX_SESSION_ID_CHARS:
            return worker_pb2.OpenSessionResponse(message=f"session_id: longer than {MAX_SESSION_ID_CHARS} characters")
        refusal: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._inbox.put(OpenSession(request.session_id, request.capacity_tokens, request.ttl_ms / 1000.0, refusal))
        message = await asyncio.wrap_future(refusal)
        return worker_pb2.OpenSessionResponse(opened=not message, message=message)

    async def CloseSession(
        self, request: worker_pb2.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CloseSessionResponse:
        closed: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._inbox.put(CloseSession(request.session_id, closed))
        return worker_pb2.CloseSessionResponse(closed=await asyncio.wrap_future(closed))

    async def _read(self, requests: AsyncIterator[worker_pb2.GenerateRequest], peer: int, stream: PeerStream) -> None:
        async for request in requests:
            for submit in request.submits:
                self._submit(submit, peer, stream)
            for handle in request.aborts:
                self._inbox.put(Abort(peer, handle))

    def _submit(self, message: worker_pb2.Submit, peer: int, stream: PeerStream) -> None:
        stream.opened(message.handle)
        logger.debug("submitted", extra=fields(request_id=message.request_id, prompt_tokens=len(message.prompt_ids)))
        try:
            submit = submit_from_pb(message, peer, self._model, secrets.randbits(64))
        except InvalidRequest as error:
            logger.info("refused: %s", error, extra=fields(request_id=message.request_id))
            stream.open.discard(message.handle)
            stream.put(worker_pb2.StepOutput(finishes=[refusal_to_pb(message, error)]))
            return
        self._on_arrival(peer, message.handle)
        self._inbox.put(submit)
