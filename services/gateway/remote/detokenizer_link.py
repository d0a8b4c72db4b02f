"""The gateway's streams to the detokenizers.

A DetokLink owns the stream to one address. Its DecodeWindow has the state of the stream. A DetokPool owns the links.

Each Decoding is pinned to one link. If the link's stream breaks, or the detokenizer does not reply within its Patience, the
decodings of the link move to another link, or wait until a link is usable. They continue after the last received character.
Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from rootstock_llm.protos import detokenizer_pb2, detokenizer_pb2_grpc
from rootstock_llm.services.gateway.discovery.endpoints import Endpoints
from rootstock_llm.services.gateway.generation.decoding import Decoding
from rootstock_llm.services.gateway.generation.errors import internal, unavailable
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.remote.connection import (
    ANY_MODEL,
    INFO_S,
    Duplex,
    Patience,
    StreamBroken,
    keep_connected,
    request_info,
    serves_model,
    until_lost,
)
from rootstock_llm.services.gateway.remote.replicas import Replicas
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer, LongLivedChannel
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

# Limit of Decoding.breaks, the batches that were lost with their streams since the last text. Above it, the decoding fails.
MAX_BREAKS = 16
# Limit of Decoding.lost. Above it, the decoding fails, because perhaps no detokenizer can decode its ids.
MAX_LOST = 3
SILENCE_S = 5.0  # seconds without a reply to a batch after which a detokenizer is lost; it replies to each batch immediately
MAX_IN_FLIGHT = 2  # limit of batches without a reply: one is on its way while the other is decoded
# Limit of ids per batch, including replayed ids and characters of stop strings. A batch of a single row may exceed it. The limit
# keeps replies fast even if all decodings of a lost detokenizer arrive together.
MAX_BATCH_IDS = 1 << 17

T = TypeVar("T")
Call = Duplex[detokenizer_pb2.DecodeBatch, detokenizer_pb2.TextBatch]
Rows = list[tuple[int, int, bool]]  # handle of a decoding, number of new ids, whether the decoding is finished


class DecodeWindow:
    """The open decodings, unsent changes and batches without a reply of one stream to a detokenizer. It does no I/O.

    Handles are unique within a stream. A decoding is in `open` from adopt() until its last text, drop() or reset(). After
    reset(), the window is used for a new stream.
    """

    def __init__(self, on_lost: Callable[[list[Decoding]], None], on_change: Callable[[], None]) -> None:
        """Makes an empty window.

        Args:
            on_lost: Called with decodings that the detokenizer reports as unknown.
            on_change: Called when the window may have new data to send, or fewer open decodings.
        """
        self.open: dict[int, Decoding] = {}  # open decodings by handle, including decodings that were never sent
        self.num_replies = 0  # number of received replies
        self._opening: dict[int, Decoding] = {}  # decodings of _dirty whose open message is not sent
        self._dirty: dict[int, Decoding] = {}  # decodings with unsent ids or an unsent finish
        self._closes: list[int] = []  # handles of dropped decodings, to be sent
        self._in_flight: deque[tuple[int, Rows]] = deque()  # sequence number and rows of each batch without a reply
        self._seq = 0  # sequence number of the last batch
        self._on_lost = on_lost
        self._on_change = on_change

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_more(self) -> bool:
        return bool(self._dirty or self._closes)

    def adopt(self, decoding: Decoding, handle: int) -> None:
        """Pins a decoding to this stream under a handle that was never used before."""
        decoding.stream, decoding.handle, decoding.sent = self, handle, decoding.decoded
        self.open[handle] = self._opening[handle] = self._dirty[handle] = decoding
        self._on_change()

    def touch(self, decoding: Decoding) -> None:
        self._dirty[decoding.handle] = decoding
        self._on_change()

    def drop(self, decoding: Decoding) -> None:
        if self.open.pop(decoding.handle, None) is None:
            return
        self._dirty.pop(decoding.handle, None)
        if self._opening.pop(decoding.handle, None) is None:
            self._closes.append(decoding.handle)
        decoding.stream = None
        self._on_change()

    def greeting(self) -> detokenizer_pb2.DecodeBatch:
        """Returns the first batch of a stream. It is empty; its reply shows that the detokenizer serves the stream."""
        self._in_flight.append((0, []))
        return detokenizer_pb2.DecodeBatch(seq=0)

    def next_batch(self) -> detokenizer_pb2.DecodeBatch | None:
        """Returns a batch with the changes since the last batch.

        Returns:
            None if there are no changes, or if MAX_IN_FLIGHT batches have no reply.
        """
        if not self.has_more or len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        self._seq += 1
        batch = detokenizer_pb2.DecodeBatch(seq=self._seq, closes=self._closes)
        self._closes.clear()
        rows: Rows = []
        size = 0
        for handle, decoding in self._dirty.items():
            opens = handle in self._opening
            size += len(decoding.ids) - decoding.sent + (decoding.open_size if opens else 0)
            if rows and size > MAX_BATCH_IDS:
                break
            if opens:
                batch.opens.append(decoding.open_message())
            new = decoding.ids[decoding.sent :]
            decoding.sent = len(decoding.ids)
            rows.append((handle, len(new), decoding.finished))
            batch.token_ids.extend(new)
            batch.matched_stops.append(decoding.matched_stop)
        batch.handles.extend(row[0] for row in rows)
        batch.counts.extend(row[1] for row in rows)
        batch.finished.extend(row[2] for row in rows)
        for handle, _, _ in rows:
            del self._dirty[handle]
            self._opening.pop(handle, None)
        self._in_flight.append((self._seq, rows))
        return batch

    def apply_reply(self, batch: detokenizer_pb2.TextBatch) -> None:
        """Applies the reply to the oldest batch without a reply.

        Passes decodings that the detokenizer does not know to `on_lost`. All other decodings of the batch get their texts.

        Raises:
            StreamBroken: The reply does not match the batch.
        """
        if not self._in_flight:
            raise StreamBroken("the detokenizer sent a reply without a batch")
        seq, rows = self._in_flight[0]
        if batch.unknown:
            unknown = frozenset(batch.unknown)
            lost = [row[0] for row in rows if row[0] in unknown]
            rows = [row for row in rows if row[0] not in unknown]
        else:
            lost = []
        if batch.seq != seq or len(batch.texts) != len(rows) or list(batch.handles) != [row[0] for row in rows]:
            raise StreamBroken(f"the detokenizer's reply {batch.seq} does not match batch {seq} of {len(rows)} rows")
        self._in_flight.popleft()
        self.num_replies += 1
        # The lost decodings are removed first, because a sink that receives a text may call touch() or drop() of them.
        if lost:
            self._on_lost(self._take_lost(lost))
        for (handle, count, finished), text in zip(rows, batch.texts, strict=True):
            self._deliver(handle, count, finished, text)
        self._on_change()

    def _deliver(self, handle: int, count: int, finished: bool, text: str) -> None:
        decoding = self.open.get(handle)
        if decoding is None:
            return  # the decoding is dropped, or open under another handle
        decoding.breaks = 0
        decoding.decoded += count
        decoding.emitted_chars += len(text)
        if finished:
            del self.open[handle]
            decoding.stream, decoding.done = None, True
        decoding.sink.on_text(text, count)

    def _take_lost(self, handles: list[int]) -> list[Decoding]:
        lost = [self.open.pop(handle) for handle in handles if handle in self.open]
        for decoding in lost:
            self._dirty.pop(decoding.handle, None)
            decoding.stream = None
            decoding.lost += 1
        return lost

    def reset(self) -> list[Decoding]:
        """Clears the window after the end of its stream. Returns the decodings that were open."""
        orphans = list(self.open.values())
        for _, rows in self._in_flight:
            for handle, _, _ in rows:
                if handle in self.open:
                    self.open[handle].breaks += 1
        self.open.clear()
        self._opening.clear()
        self._dirty.clear()
        self._closes.clear()
        self._in_flight.clear()
        self._seq = 0
        for decoding in orphans:
            decoding.stream = None
        return orphans


class DetokLink:
    """The stream to one detokenizer, and the decodings that are pinned to this stream."""

    def __init__(
        self,
        address: str,
        patience: Patience,
        on_up: Callable[[DetokLink], None],
        on_down: Callable[[list[Decoding]], None],
        on_idle: Callable[[DetokLink], None],
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        """Makes the link.

        Args:
            on_up: Called when the stream is up.
            on_down: Called with decodings that need another link. After the end of the stream, these are all its decodings.
                Otherwise, these are the decodings that the detokenizer does not know.
            on_idle: Called when no decoding is open.
        """
        self.address = address
        self._dialer = dialer
        self.connected = False  # the stream is up
        self.ready = True  # discovery allows new decodings
        self.retiring = False  # discovery has dropped the address; the link ends when no decoding is open
        self.model = ANY_MODEL  # model that the detokenizer of the current stream serves
        self.stub: detokenizer_pb2_grpc.DetokenizerStub | None = None  # set while run() runs
        self._patience = patience
        self._on_up = on_up
        self._on_down = on_down
        self._on_idle = on_idle
        self.window = DecodeWindow(on_down, self._changed)  # decodings that are pinned to this link
        self._wake = asyncio.Event()

    @property
    def busy(self) -> bool:
        return bool(self.window.open)

    def takes(self, model: str) -> bool:
        """Returns whether a new decoding of this model may be pinned to this link."""
        return self.connected and self.ready and serves_model(self.model, model)

    def _changed(self) -> None:
        if self.window.has_more:
            self._wake.set()
        if not self.busy:
            self._on_idle(self)

    async def run(self) -> None:
        kept = self._dialer.long_lived_channel(self.address, Role.DETOKENIZER)
        try:
            await keep_connected("detokenizer", self.address, lambda: self._session(kept))
        finally:
            self.stub = None
            await kept.close()

    async def _session(self, kept: LongLivedChannel) -> None:
        self.stub = stub = detokenizer_pb2_grpc.DetokenizerStub(kept.now())
        call: Call = stub.Decode(wait_for_ready=True)
        helpers: list[asyncio.Task[Any]] = []
        silence: asyncio.Task[str] | None = None
        try:
            async with kept.opening():
                await call.write(self.window.greeting())
            silence = self._helper(call, until_lost(self.address, self._patience, self._replies_due))
            helpers.append(silence)
            await self._receive(call)
            info = partial(stub.Info, detokenizer_pb2.DetokenizerInfoRequest(), timeout=INFO_S)
            info_reply = await request_info(info, self.address)
            self.model = ANY_MODEL if info_reply is None else info_reply.model
            self.connected = True
            logger.info("detokenizer connected", extra=fields(address=self.address, model=self.model))
            helpers.append(self._helper(call, self._write(call)))
            self._on_up(self)
            while True:
                await self._receive(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if silence is None or not silence.done() or task is None or task.cancelling():
                raise
            raise StreamBroken(silence.result()) from None
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()
            self.connected = False
            self._on_down(self.window.reset())
            self._changed()

    @staticmethod
    def _helper(call: Call, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Starts a task of the session. The end of the task cancels the call."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: call.cancel())
        return task

    async def _receive(self, call: Call) -> None:
        batch = await call.read()
        if not isinstance(batch, detokenizer_pb2.TextBatch):
            raise StreamBroken("the detokenizer ended the stream")
        self.window.apply_reply(batch)

    async def _write(self, call: Call) -> None:
        """Sends batches of the changes since the last batch."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (batch := self.window.next_batch()) is not None:
                    await call.write(batch)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading task raises the reason

    def _replies_due(self) -> int | None:
        """Returns the number of replies so far, or None if no reply is due."""
        return self.window.num_replies if self.window.in_flight else None


class DetokPool:
    """The links to all detokenizers.

    Each decoding is pinned to the usable link with the fewest decodings. If no link is usable within wait_s, the decoding fails.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        wait_s: float,
        retry_after_s: int,
        handles: Iterator[int],
        metrics: GatewayMetrics,
        changed: Callable[[], None],
        patience: Patience,
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        """Makes the pool.

        Args:
            addresses: Addresses to use until set_endpoints() is called.
            wait_s: Seconds for which a decoding waits for a link.
            retry_after_s: Retry-After of the error, in seconds.
            handles: Yields unique handles.
            changed: Called when connected() may have changed.
        """
        self._replicas = Replicas(self._make)
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._handles = handles
        self._retries = metrics.retries.labels("detokenizer")
        self._changed = changed
        self._patience = patience
        self._dialer = dialer
        self._waiting: dict[Decoding, None] = {}
        metrics.watch_connected("detokenizer", self.connected)
        self.set_endpoints(dict.fromkeys(addresses, True))

    def _make(self, address: str) -> DetokLink:
        return DetokLink(address, self._patience, self._up, self._down, self._replicas.retire, self._dialer)

    @property
    def links(self) -> list[DetokLink]:
        """All links, including retiring links."""
        return list(self._replicas.by_address.values())

    def connected(self, model: str = ANY_MODEL) -> int:
        """Returns the number of links that take new decodings of the model."""
        return sum(link.takes(model) for link in self.links)

    def stubs(self, model: str = ANY_MODEL) -> list[detokenizer_pb2_grpc.DetokenizerStub]:
        """Returns the stubs of the usable detokenizers, for unary calls."""
        return [link.stub for link in self.links if link.takes(model) and link.stub is not None]

    def set_endpoints(self, endpoints: Endpoints) -> None:
        """Applies new endpoints. A link to a removed endpoint serves its decodings until they end or the stream breaks."""
        self._replicas.set_endpoints(endpoints)
        self._changed()
        self._place_waiting()

    async def run(self) -> None:
        """Keeps the streams up until cancelled. May be called once."""
        await self._replicas.run()

    def touch(self, decoding: Decoding) -> None:
        """Queues new ids or the finish of a decoding for its detokenizer. Has no effect if its ids may wait for more ids."""
        if decoding.may_wait:
            return
        if decoding.stream is not None:
            decoding.stream.touch(decoding)
        elif decoding.link_timer is None:
            self._place(decoding)

    def drop(self, decoding: Decoding) -> None:
        """Ends a decoding before its last text. Idempotent; may be called in any state."""
        if decoding.link_timer is not None:
            self._waiting.pop(decoding, None)
            decoding.link_timer.cancel()
            decoding.link_timer = None
        if decoding.stream is not None:
            decoding.stream.drop(decoding)

    def _link_for(self, decoding: Decoding) -> DetokLink | None:
        links = [link for link in self.links if link.takes(decoding.model)]
        return min(links, key=lambda link: len(link.window.open), default=None)

    def _place(self, decoding: Decoding) -> None:
        link = self._link_for(decoding)
        if link is not None:
            link.window.adopt(decoding, next(self._handles))
            return
        loop = asyncio.get_running_loop()
        self._waiting[decoding] = None
        decoding.link_timer = loop.call_later(self._wait_s, self._fail_waiting, decoding)

    def _place_waiting(self) -> None:
        """Pins waiting decodings to usable links. Decodings without a usable link continue to wait for the rest of wait_s."""
        for decoding in list(self._waiting):
            link = self._link_for(decoding)
            if link is not None:
                self.drop(decoding)
                link.window.adopt(decoding, next(self._handles))

    def _fail_waiting(self, decoding: Decoding) -> None:
        self.drop(decoding)
        decoding.sink.on_decode_failed(unavailable("No detokenizer is available.", self._retry_after_s))

    def _up(self, _link: DetokLink) -> None:
        self._changed()
        self._place_waiting()

    def _down(self, orphans: list[Decoding]) -> None:
        self._changed()
        # Decodings that continue are placed first: a decoding that fails drops the other decodings of its request, on any link.
        for decoding in orphans:
            if decoding.lost <= MAX_LOST and decoding.breaks <= MAX_BREAKS:
                self._retries.inc()
                self._place(decoding)
        for decoding in orphans:
            if decoding.lost > MAX_LOST or decoding.breaks > MAX_BREAKS:
                decoding.sink.on_decode_failed(internal("The detokenizer cannot decode this completion."))
