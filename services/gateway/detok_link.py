"""The gateway's streams to the detokenizers. A DetokLink owns one address's stream; a DetokPool owns the links.

Every Decoding is pinned to one link. When the link's stream breaks, its decodings move to another one, or wait for one, and
go on from the last character that came back. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import grpc

from rootstock.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.gateway.decoding import Decoding
from services.gateway.errors import internal, unavailable
from services.gateway.metrics import GatewayMetrics
from services.gateway.reconnect import Duplex, StreamBroken, keep_connected
from services.shared import rpc
from services.shared.log import fields

logger = logging.getLogger(__name__)

# Unanswered batches at most. Behind that, new ids of a row join its next batch instead of making more batches.
MAX_IN_FLIGHT = 8
MAX_LOST = 3  # reopenings of one decoding: one that can never be decoded does not go round for ever

Rows = list[tuple[int, int, bool]]  # handle, new ids, finished
Call = Duplex[detokenizer_pb2.DecodeBatch, detokenizer_pb2.TextBatch]


class DetokLink:
    """One detokenizer. `open` holds the decodings pinned to it, by handle, whether they were sent yet or not."""

    def __init__(self, address: str, on_up: Callable[[DetokLink], None], on_down: Callable[[list[Decoding]], None]) -> None:
        self.address = address
        self.connected = False
        self.stub: detokenizer_pb2_grpc.DetokenizerStub | None = None  # while run() runs
        self.open: dict[int, Decoding] = {}
        self._on_up = on_up
        self._on_down = on_down
        self._opening: list[Decoding] = []
        self._dirty: dict[int, Decoding] = {}  # with ids or a finish to send
        self._closes: list[int] = []
        self._in_flight: deque[tuple[int, Rows]] = deque()
        self._seq = 0
        self._wake = asyncio.Event()

    def adopt(self, decoding: Decoding, handle: int) -> None:
        """Pins a decoding to this link under a handle that was never used before."""
        decoding.link, decoding.handle, decoding.sent = self, handle, decoding.decoded
        self.open[handle] = decoding
        self._opening.append(decoding)
        self.touch(decoding)

    def touch(self, decoding: Decoding) -> None:
        self._dirty[decoding.handle] = decoding
        self._wake.set()

    def drop(self, decoding: Decoding) -> None:
        if self.open.pop(decoding.handle, None) is None:
            return
        self._dirty.pop(decoding.handle, None)
        if decoding in self._opening:
            self._opening.remove(decoding)
        else:
            self._closes.append(decoding.handle)
            self._wake.set()
        decoding.link = None

    async def run(self) -> None:
        channel = rpc.channel(self.address)
        self.stub = stub = detokenizer_pb2_grpc.DetokenizerStub(channel)  # type: ignore[no-untyped-call]
        try:
            await keep_connected("detokenizer", self.address, lambda: self._session(stub.Decode(wait_for_ready=True)))
        finally:
            self.stub = None
            await channel.close()

    async def _session(self, call: Call) -> None:
        writer: asyncio.Task[None] | None = None
        try:
            # The stream has no greeting: an empty batch and its answer show that somebody serves it.
            self._seq = 0
            await call.write(detokenizer_pb2.DecodeBatch(seq=0))
            self._in_flight.append((0, []))
            self._answered(await self._read(call))
            self.connected = True
            logger.info("detokenizer connected", extra=fields(address=self.address))
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            self._on_up(self)
            while True:
                self._answered(await self._read(call))
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()
            self._reset()

    def _reset(self) -> None:
        orphans = list(self.open.values())
        self.connected = False
        self.open.clear()
        self._opening.clear()
        self._dirty.clear()
        self._closes.clear()
        self._in_flight.clear()
        for decoding in orphans:
            decoding.link = None
        self._on_down(orphans)

    @staticmethod
    async def _read(call: Call) -> detokenizer_pb2.TextBatch:
        batch = await call.read()
        if not isinstance(batch, detokenizer_pb2.TextBatch):
            raise StreamBroken("ended by peer")
        return batch

    async def _write(self, call: Call) -> None:
        """Sends what has gathered since the last batch: at most one batch per event-loop tick."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if len(self._in_flight) < MAX_IN_FLIGHT and (self._dirty or self._closes):
                    await call.write(self._next_batch())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, with its reason

    def _next_batch(self) -> detokenizer_pb2.DecodeBatch:
        rows: Rows = []
        token_ids: list[int] = []
        matched: list[str] = []
        for handle, decoding in self._dirty.items():
            new = decoding.ids[decoding.sent :]
            decoding.sent = len(decoding.ids)
            rows.append((handle, len(new), decoding.finished))
            token_ids += new
            matched.append(decoding.matched_stop)
        self._seq += 1
        batch = detokenizer_pb2.DecodeBatch(
            seq=self._seq,
            opens=[decoding.open_message() for decoding in self._opening],
            handles=[row[0] for row in rows],
            counts=[row[1] for row in rows],
            token_ids=token_ids,
            finished=[row[2] for row in rows],
            matched_stops=matched,
            closes=self._closes,
        )
        self._in_flight.append((self._seq, rows))
        self._dirty.clear()
        self._opening.clear()
        self._closes.clear()
        return batch

    def _answered(self, batch: detokenizer_pb2.TextBatch) -> None:
        if not self._in_flight:
            raise StreamBroken("an answer to no batch")
        seq, rows = self._in_flight.popleft()
        if batch.unknown:
            unknown = frozenset(batch.unknown)
            self._reopen([row[0] for row in rows if row[0] in unknown])
            rows = [row for row in rows if row[0] not in unknown]
        if batch.seq != seq or len(batch.texts) != len(rows) or list(batch.handles) != [row[0] for row in rows]:
            raise StreamBroken("an answer that does not fit its batch")
        if self._dirty or self._closes:
            self._wake.set()  # the window has room
        for (handle, count, finished), text in zip(rows, batch.texts, strict=True):
            decoding = self.open.get(handle)
            if decoding is None:
                continue  # dropped, or reopened under another handle
            decoding.decoded += count
            decoding.emitted_chars += len(text)
            if finished:
                del self.open[handle]
                decoding.link, decoding.done = None, True
            decoding.sink.on_text(text, count)

    def _reopen(self, unknown: list[int]) -> None:
        lost = [self.open.pop(handle) for handle in unknown if handle in self.open]
        for decoding in lost:
            self._dirty.pop(decoding.handle, None)
            decoding.link = None
            decoding.lost += 1
        self._on_down(lost)


class DetokPool:
    """Pins decodings to links: the connected one with the fewest. Ends them with an error when none connects in time."""

    def __init__(
        self,
        addresses: Sequence[str],
        wait_s: float,
        retry_after_s: int,
        handles: Iterator[int],
        metrics: GatewayMetrics,
        changed: Callable[[], None],
    ) -> None:
        self.links = [DetokLink(address, self._up, self._down) for address in addresses]
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._handles = handles
        self._retries = metrics.retries.labels("detokenizer")
        self._changed = changed
        self._homeless: dict[Decoding, None] = {}
        metrics.watch_connected("detokenizer", self.connected)

    def connected(self) -> int:
        return sum(link.connected for link in self.links)

    def stubs(self) -> list[detokenizer_pb2_grpc.DetokenizerStub]:
        """Of the connected detokenizers, for calls beside the streams."""
        return [link.stub for link in self.links if link.connected and link.stub is not None]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.run())

    def touch(self, decoding: Decoding) -> None:
        """`ids` has grown or the decoding is finished: its text will come."""
        if decoding.link is not None:
            decoding.link.touch(decoding)
        elif decoding.homeless is None:
            self._house(decoding)

    def drop(self, decoding: Decoding) -> None:
        """No more text is wanted. Legal at any time, any number of times."""
        if decoding.homeless is not None:
            self._homeless.pop(decoding, None)
            decoding.homeless.cancel()
            decoding.homeless = None
        if decoding.link is not None:
            decoding.link.drop(decoding)

    def _house(self, decoding: Decoding) -> None:
        links = [link for link in self.links if link.connected]
        if links:
            min(links, key=lambda link: len(link.open)).adopt(decoding, next(self._handles))
            return
        loop = asyncio.get_running_loop()
        self._homeless[decoding] = None
        decoding.homeless = loop.call_later(self._wait_s, self._give_up, decoding)

    def _give_up(self, decoding: Decoding) -> None:
        self.drop(decoding)
        decoding.sink.on_decode_failed(unavailable("No detokenizer is available.", self._retry_after_s))

    def _up(self, _link: DetokLink) -> None:
        self._changed()
        waiting = list(self._homeless)
        for decoding in waiting:
            self.drop(decoding)
            self._house(decoding)

    def _down(self, orphans: list[Decoding]) -> None:
        self._changed()
        # Those that go on first: a failure drops its siblings, wherever they are by then.
        for decoding in orphans:
            if decoding.lost <= MAX_LOST:
                self._retries.inc()
                self._house(decoding)
        for decoding in orphans:
            if decoding.lost > MAX_LOST:
                decoding.sink.on_decode_failed(internal("The detokenizer cannot decode this answer."))
