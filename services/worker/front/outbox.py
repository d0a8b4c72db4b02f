"""Messages on their way to front ends, one stream for each.

Lives on the asyncio loop; the scheduler's loop hands outputs over with `StreamOutbox.send`, from its own thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from rootstock.v1 import common_pb2, worker_pb2
from services.shared.observe.log_fields import fields
from services.worker.core.contracts.messages import ErrorCode, PeerOutput, StepOutput
from services.worker.front.wire import output_to_pb

logger = logging.getLogger(__name__)

MERGED_BYTES = 1 << 20  # of outputs that become one message: behind a slow front end they gather, and a message has its limit


class ProtocolError(Exception):
    """A front end broke the contract; its stream ends, and with it all that came over it."""


class PeerStream:
    """What one front end is to be told. While it is slow its outputs merge, up to MERGED_BYTES, and its loads replace one
    another, so that memory follows requests, not steps. told: the last load's news, told_at: when, on the asyncio loop's
    clock."""

    def __init__(self) -> None:
        self._pending: deque[worker_pb2.StepOutput] = deque()
        self._last_bytes = 0  # of the last of them, if it has been asked for
        self._load: worker_pb2.WorkerLoad | None = None
        self._hello: worker_pb2.WorkerInfo | None = None
        self._ends = False
        self._ready = asyncio.Event()
        self.open: set[int] = set()
        self.told: worker_pb2.WorkerLoad | None = None
        self.told_at = 0.0

    def opened(self, handle: int) -> None:
        """A request has come; it is open until its terminal output. Raises ProtocolError if the handle is open already."""
        if handle in self.open:
            raise ProtocolError(f"handle {handle} is in use")
        self.open.add(handle)

    def put(self, message: worker_pb2.StepOutput) -> None:
        more = message.ByteSize() if self._pending else 0
        if self._pending and (gathered := (self._last_bytes or self._pending[-1].ByteSize()) + more) <= MERGED_BYTES:
            self._pending[-1].MergeFrom(message)
            self._last_bytes = gathered
        else:
            self._pending.append(message)
            self._last_bytes = more
        self._ready.set()

    def put_hello(self, info: worker_pb2.WorkerInfo) -> None:
        """It overtakes what is here: a request's revision is that of its submit, whenever its tokens are read."""
        self._hello = info
        self._ready.set()

    def put_load(self, load: worker_pb2.WorkerLoad, news: worker_pb2.WorkerLoad, now: float) -> None:
        """news: of the load, what is worth telling when it has changed."""
        self._load, self.told, self.told_at = load, news, now
        self._ready.set()

    def end(self) -> None:
        """Nothing follows what is here."""
        self._ends = True
        self._ready.set()

    async def take(self) -> worker_pb2.GenerateResponse | None:
        """The next message, None at the end. Hellos and loads come first: there are few, and steps may never cease."""
        while True:
            await self._ready.wait()
            if self._hello is not None:
                hello, self._hello = self._hello, None
                return worker_pb2.GenerateResponse(hello=hello)
            if self._load is not None:
                load, self._load = self._load, None
                return worker_pb2.GenerateResponse(load=load)
            if self._pending:
                return worker_pb2.GenerateResponse(step=self._pending.popleft())
            if self._ends:
                return None
            self._ready.clear()


class StreamOutbox:
    """The loop's way out. Outputs for a front end that has gone are dropped: nobody is there to hear them.

    closed: why new requests are turned away, "" while they are welcome.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[int, PeerStream] = {}
        self._left = asyncio.Event()
        self._abandoned = False
        self.closed = ""

    @property
    def streams(self) -> list[PeerStream]:
        return list(self._streams.values())

    @property
    def num_open(self) -> int:
        """Requests whose terminal output is still to come, over all front ends."""
        return sum(len(stream.open) for stream in self._streams.values())

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

    def end(self) -> None:
        """Every stream ends once its front end has taken what is here. Requests that are still open end as unavailable: the
        scheduler's loop, which owns them, is not heard any more."""
        self._abandoned = True
        for stream in self._streams.values():
            if stream.open:
                stream.put(worker_pb2.StepOutput(finishes=[unavailable(handle, self.closed) for handle in sorted(stream.open)]))
                stream.open.clear()
            stream.end()
        self._left.set()

    def send(self, output: StepOutput) -> None:
        """From the loop's thread."""
        self._loop.call_soon_threadsafe(self._deliver, output.peers)

    def _deliver(self, peers: tuple[PeerOutput, ...]) -> None:
        if self._abandoned:
            return
        for output in peers:
            _log_faults(output)
            if stream := self._streams.get(output.peer):
                stream.open.difference_update(finish.handle for finish in output.finishes)
                self._left.set()
                stream.put(output_to_pb(output))


def _log_faults(output: PeerOutput) -> None:
    """What has gone wrong says why without saying whose request it was; this says whose."""
    for finish in output.finishes:
        if finish.error is ErrorCode.INTERNAL:
            logger.error("request failed: %s", finish.message, extra=fields(request_id=finish.request_id))


def unavailable(handle: int, message: str) -> worker_pb2.Finish:
    """For a front end that may take its request elsewhere."""
    return worker_pb2.Finish(
        handle=handle, reason=common_pb2.FINISH_REASON_ABORT, error=common_pb2.ERROR_CODE_UNAVAILABLE, message=message
    )
