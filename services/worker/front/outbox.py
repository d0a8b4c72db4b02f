"""The messages that wait to be sent to gateways, by stream.

All of this runs on the asyncio loop. The scheduler's loop passes outputs to StreamOutbox.send() from its own thread.
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

# Limit of outputs that are merged into one message. They accumulate if a gateway is slow, and gRPC limits a message.
MERGED_BYTES = 1 << 20


class ProtocolError(Exception):
    """A gateway has broken the protocol. Its stream ends with all of its requests."""


class PeerStream:
    """The messages that wait for one gateway.

    While the gateway is slow, outputs are merged up to MERGED_BYTES, and a new load replaces an old one. Memory therefore depends
    on the number of requests and not on the number of steps.
    """

    def __init__(self) -> None:
        self._pending: deque[worker_pb2.StepOutput] = deque()
        self._last_bytes = 0  # size of the last pending message; 0 if it is not known
        self._load: worker_pb2.WorkerLoad | None = None
        self._hello: worker_pb2.WorkerInfo | None = None
        self._ends = False
        self._ready = asyncio.Event()
        self.open: set[int] = set()  # handles of requests without a terminal output
        self.told: worker_pb2.WorkerLoad | None = None  # reported part of the last load
        self.told_at = 0.0  # time of the last load on the asyncio loop's clock

    def opened(self, handle: int) -> None:
        """Records a new request, which is open until its terminal output. Raises ProtocolError if its handle is open already."""
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
        """Queues a hello, which overtakes the pending messages.

        This is safe because the revision of a request is that of its submit, whenever its tokens are read.
        """
        self._hello = info
        self._ready.set()

    def put_load(self, load: worker_pb2.WorkerLoad, news: worker_pb2.WorkerLoad, now: float) -> None:
        """Queues a load. `news` is the part of it whose changes are reported."""
        self._load, self.told, self.told_at = load, news, now
        self._ready.set()

    def end(self) -> None:
        """Ends the stream after the pending messages."""
        self._ends = True
        self._ready.set()

    async def take(self) -> worker_pb2.GenerateResponse | None:
        """Waits for the next message and returns it, or None at the end of the stream.

        Hellos and loads come first, because there are few of them and outputs may never cease.
        """
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
    """The outbox of the scheduler's loop. Outputs for a stream that has ended are dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[int, PeerStream] = {}
        self._left = asyncio.Event()
        self._abandoned = False
        self.closed = ""  # reason for refusing new requests; empty if they are accepted

    @property
    def streams(self) -> list[PeerStream]:
        return list(self._streams.values())

    @property
    def num_open(self) -> int:
        """Number of requests without a terminal output, over all streams."""
        return sum(len(stream.open) for stream in self._streams.values())

    async def wait_empty(self) -> None:
        """Waits until every request has its terminal output."""
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
        """Ends every stream after its pending messages.

        Open requests end as unavailable, because outputs of the scheduler's loop, which owns them, are not accepted any longer.
        """
        self._abandoned = True
        for stream in self._streams.values():
            if stream.open:
                stream.put(worker_pb2.StepOutput(finishes=[unavailable(handle, self.closed) for handle in sorted(stream.open)]))
                stream.open.clear()
            stream.end()
        self._left.set()

    def send(self, output: StepOutput) -> None:
        """Passes outputs to the asyncio loop. Called on the thread of the scheduler's loop."""
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
    """Logs internal errors with their request ids, because earlier log lines of such errors do not have them."""
    for finish in output.finishes:
        if finish.error is ErrorCode.INTERNAL:
            logger.error("request failed: %s", finish.message, extra=fields(request_id=finish.request_id))


def unavailable(handle: int, message: str) -> worker_pb2.Finish:
    """Returns the finish of a request that its gateway may send to another worker."""
    return worker_pb2.Finish(
        handle=handle, reason=common_pb2.FINISH_REASON_ABORT, error=common_pb2.ERROR_CODE_UNAVAILABLE, message=message
    )
