"""The gateway's streams to the detokenizers. A DetokLink owns one address's stream; a DetokPool owns the links.

Every Decoding is pinned to one link. When the link's stream breaks or falls silent, its decodings move to another one, or wait
for one, and go on from the last character that came back. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence

import grpc

from rootstock.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.gateway.discovery.endpoints import Endpoints
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers import served_model
from services.gateway.peers.detokenizer_window import DecodeWindow
from services.gateway.peers.reconnect import Duplex, StreamBroken, keep_connected
from services.gateway.request.decoding import Decoding
from services.gateway.request.errors import internal, unavailable
from services.shared.observe.log import fields
from services.shared.rpc import grpc_server as rpc

logger = logging.getLogger(__name__)

MAX_BREAKS = 16  # batches of one decoding whose stream broke, without a text between
MAX_LOST = 3  # reopenings of one decoding: one that can never be decoded does not go round for ever
SILENCE_S = 5.0  # without an answer while batches are unanswered: every batch is answered at once, so nobody is there
SILENCE_TICKS = 4  # that a silence is counted in: this process's own pauses are one tick, however long

Call = Duplex[detokenizer_pb2.DecodeBatch, detokenizer_pb2.TextBatch]


class DetokLink:
    """One detokenizer. `open` holds the decodings pinned to it, by handle, whether they were sent yet or not.

    connected: its stream is up. ready: it may be given new decodings. retiring: it ends when `open` is empty.
    """

    def __init__(
        self,
        address: str,
        silence_s: float,
        on_up: Callable[[DetokLink], None],
        on_down: Callable[[list[Decoding]], None],
        on_empty: Callable[[DetokLink], None],
    ) -> None:
        """`on_empty` is called while retiring, when nothing is open any more."""
        self.address = address
        self.connected = False
        self.ready = True
        self.retiring = False
        self.model = served_model.ANY  # of the stream that is up
        self.stub: detokenizer_pb2_grpc.DetokenizerStub | None = None  # while run() runs
        self._silence_s = silence_s
        self._on_up = on_up
        self._on_down = on_down
        self._on_empty = on_empty
        self._window = DecodeWindow(on_down)
        self._wake = asyncio.Event()

    @property
    def open(self) -> dict[int, Decoding]:
        return self._window.open

    def takes(self, model: str) -> bool:
        """Whether a new decoding of this model may be pinned to it."""
        return self.connected and self.ready and served_model.serves(self.model, model)

    def adopt(self, decoding: Decoding, handle: int) -> None:
        """Pins a decoding to this link under a handle that was never used before."""
        decoding.link = self
        self._window.adopt(decoding, handle)
        self._wake.set()

    def touch(self, decoding: Decoding) -> None:
        self._window.touch(decoding)
        self._wake.set()

    def drop(self, decoding: Decoding) -> None:
        self._window.drop(decoding)
        self._wake.set()
        self._retire()

    async def run(self) -> None:
        channel = rpc.channel(self.address)
        self.stub = stub = detokenizer_pb2_grpc.DetokenizerStub(channel)  # type: ignore[no-untyped-call]
        try:
            await keep_connected("detokenizer", self.address, lambda: self._session(stub))
        finally:
            self.stub = None
            await channel.close()

    async def _session(self, stub: detokenizer_pb2_grpc.DetokenizerStub) -> None:
        call: Call = stub.Decode(wait_for_ready=True)
        helpers: list[asyncio.Task[None]] = []
        silence: asyncio.Task[None] | None = None
        try:
            await call.write(self._window.greeting())
            silence = self._helper(call, self._watch_silence())
            helpers.append(silence)
            await self._receive(call)
            info = stub.Info(detokenizer_pb2.DetokenizerInfoRequest(), timeout=served_model.INFO_S)
            self.model = await served_model.ask(info, self.address)
            self.connected = True
            logger.info("detokenizer connected", extra=fields(address=self.address, model=self.model))
            helpers.append(self._helper(call, self._write(call)))
            self._on_up(self)
            while True:
                await self._receive(call)
                self._retire()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if silence is None or not silence.done() or task is None or task.cancelling():
                raise
            raise StreamBroken(f"unanswered for {self._silence_s:g} s") from None
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()
            self.connected = False
            self._on_down(self._window.reset())
            self._retire()

    @staticmethod
    def _helper(call: Call, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task of the session. Its end is the call's end."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: call.cancel())
        return task

    async def _receive(self, call: Call) -> None:
        batch = await call.read()
        if not isinstance(batch, detokenizer_pb2.TextBatch):
            raise StreamBroken("ended by peer")
        self._window.answered(batch)
        if self._window.has_more:
            self._wake.set()  # there is room for it

    async def _write(self, call: Call) -> None:
        """Sends what has gathered since the last batch: at most one batch per event-loop tick."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (batch := self._window.next_batch()) is not None:
                    await call.write(batch)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, with its reason

    async def _watch_silence(self) -> None:
        """Returns when batches were unanswered for so long."""
        answers, ticks = -1, 0
        while ticks < SILENCE_TICKS:
            await asyncio.sleep(self._silence_s / SILENCE_TICKS)
            ticks = ticks + 1 if self._window.in_flight and self._window.answers == answers else 0
            answers = self._window.answers

    def _retire(self) -> None:
        if self.retiring and not self.open:
            self._on_empty(self)


class DetokPool:
    """Pins decodings to links: the usable one with the fewest. Ends them with an error when none is usable in time."""

    def __init__(
        self,
        addresses: Sequence[str],
        wait_s: float,
        retry_after_s: int,
        handles: Iterator[int],
        metrics: GatewayMetrics,
        changed: Callable[[], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """`addresses` until set_endpoints() is called. `changed` is called when connected() may have changed."""
        self._links: dict[str, DetokLink] = {}
        self._tasks: dict[DetokLink, asyncio.Task[None]] = {}  # while run() runs
        self._group: asyncio.TaskGroup | None = None  # while run() runs
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._handles = handles
        self._retries = metrics.retries.labels("detokenizer")
        self._changed = changed
        self._silence_s = silence_s
        self._homeless: dict[Decoding, None] = {}
        metrics.watch_connected("detokenizer", self.connected)
        self.set_endpoints(dict.fromkeys(addresses, True))

    @property
    def links(self) -> list[DetokLink]:
        """Those that retire included."""
        return list(self._links.values())

    def connected(self, model: str = served_model.ANY) -> int:
        """Detokenizers that a new decoding could go to."""
        return sum(link.takes(model) for link in self._links.values())

    def stubs(self, model: str = served_model.ANY) -> list[detokenizer_pb2_grpc.DetokenizerStub]:
        """Of the usable detokenizers, for calls beside the streams."""
        return [link.stub for link in self._links.values() if link.takes(model) and link.stub is not None]

    def set_endpoints(self, endpoints: Endpoints) -> None:
        """New ones are connected to. Those that are gone keep their decodings until these end or the stream breaks."""
        for address, ready in endpoints.items():
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = DetokLink(address, self._silence_s, self._up, self._down, self._close)
                self._start(link)
            link.ready, link.retiring = ready, False
        for link in self.links:
            if link.address not in endpoints:
                link.ready, link.retiring = False, True
                if not link.open:
                    self._close(link)
        self._changed()
        self._house_waiting()

    async def run(self) -> None:
        """Keeps the streams up until cancelled. Once in a pool's life."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for link in self._links.values():
                self._start(link)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    def _start(self, link: DetokLink) -> None:
        if self._group is not None:
            self._tasks[link] = task = self._group.create_task(link.run())
            task.add_done_callback(lambda _: self._tasks.pop(link, None))

    def _close(self, link: DetokLink) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        task = self._tasks.pop(link, None)
        if task is not None and not task.cancelling():
            task.cancel()

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

    def _link_for(self, decoding: Decoding) -> DetokLink | None:
        links = [link for link in self._links.values() if link.takes(decoding.model)]
        return min(links, key=lambda link: len(link.open), default=None)

    def _house(self, decoding: Decoding) -> None:
        link = self._link_for(decoding)
        if link is not None:
            link.adopt(decoding, next(self._handles))
            return
        loop = asyncio.get_running_loop()
        self._homeless[decoding] = None
        decoding.homeless = loop.call_later(self._wait_s, self._give_up, decoding)

    def _house_waiting(self) -> None:
        """Those that still find no link wait on, for what is left of their time."""
        for decoding in list(self._homeless):
            link = self._link_for(decoding)
            if link is not None:
                self.drop(decoding)
                link.adopt(decoding, next(self._handles))

    def _give_up(self, decoding: Decoding) -> None:
        self.drop(decoding)
        decoding.sink.on_decode_failed(unavailable("No detokenizer is available.", self._retry_after_s))

    def _up(self, _link: DetokLink) -> None:
        self._changed()
        self._house_waiting()

    def _down(self, orphans: list[Decoding]) -> None:
        self._changed()
        # Those that go on first: a failure drops its siblings, wherever they are by then.
        for decoding in orphans:
            if decoding.lost <= MAX_LOST and decoding.breaks <= MAX_BREAKS:
                self._retries.inc()
                self._house(decoding)
        for decoding in orphans:
            if decoding.lost > MAX_LOST or decoding.breaks > MAX_BREAKS:
                decoding.sink.on_decode_failed(internal("The detokenizer cannot decode this answer."))
