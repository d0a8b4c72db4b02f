"""The gateway's streams to the detokenizers. A DetokLink owns one address's stream; a DetokPool owns the links.

Every Decoding is pinned to one link. When the link's stream breaks or falls silent, its decodings move to another one, or wait
for one, and go on from the last character that came back. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from rootstock.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.gateway.discovery.endpoints import Endpoints
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers import served_model
from services.gateway.peers.detokenizer_window import DecodeWindow
from services.gateway.peers.reconnect import Duplex, StreamBroken, keep_connected
from services.gateway.peers.replicas import Replicas
from services.gateway.peers.silence import Patience, until_lost
from services.gateway.request.decoding import Decoding
from services.gateway.request.errors import internal, unavailable
from services.shared.observe.log_fields import fields
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer, KeptChannel
from services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

MAX_BREAKS = 16  # batches of one decoding whose stream broke, without a text between
MAX_LOST = 3  # reopenings of one decoding: one that can never be decoded does not go round for ever
SILENCE_S = 5.0  # without an answer while batches are unanswered: every batch is answered at once, so nobody is there
T = TypeVar("T")

Call = Duplex[detokenizer_pb2.DecodeBatch, detokenizer_pb2.TextBatch]


class DetokLink:
    """One detokenizer. `window` holds the decodings pinned to it, whether they were sent yet or not.

    connected: its stream is up. ready: it may be given new decodings. retiring: it ends when none is open.
    """

    def __init__(
        self,
        address: str,
        patience: Patience,
        on_up: Callable[[DetokLink], None],
        on_down: Callable[[list[Decoding]], None],
        on_idle: Callable[[DetokLink], None],
        dialer: Dialer = IN_THE_CLEAR,
    ) -> None:
        """`on_idle` is called when nothing is open any more."""
        self.address = address
        self._dialer = dialer
        self.connected = False
        self.ready = True
        self.retiring = False
        self.model = served_model.ANY  # of the stream that is up
        self.stub: detokenizer_pb2_grpc.DetokenizerStub | None = None  # while run() runs
        self._patience = patience
        self._on_up = on_up
        self._on_down = on_down
        self._on_idle = on_idle
        self.window = DecodeWindow(on_down, self._changed)
        self._wake = asyncio.Event()

    @property
    def busy(self) -> bool:
        return bool(self.window.open)

    def takes(self, model: str) -> bool:
        """Whether a new decoding of this model may be pinned to it."""
        return self.connected and self.ready and served_model.serves(self.model, model)

    def _changed(self) -> None:
        if self.window.has_more:
            self._wake.set()
        if not self.busy:
            self._on_idle(self)

    async def run(self) -> None:
        kept = self._dialer.kept(self.address, Role.DETOKENIZER)
        try:
            await keep_connected("detokenizer", self.address, lambda: self._session(kept))
        finally:
            self.stub = None
            await kept.close()

    async def _session(self, kept: KeptChannel) -> None:
        self.stub = stub = detokenizer_pb2_grpc.DetokenizerStub(kept.now())
        call: Call = stub.Decode(wait_for_ready=True)
        helpers: list[asyncio.Task[Any]] = []
        silence: asyncio.Task[str] | None = None
        try:
            async with kept.opening():
                await call.write(self.window.greeting())
            silence = self._helper(call, until_lost(self.address, self._patience, self._answers_due))
            helpers.append(silence)
            await self._receive(call)
            info = partial(stub.Info, detokenizer_pb2.DetokenizerInfoRequest(), timeout=served_model.INFO_S)
            said = await served_model.ask(info, self.address)
            self.model = served_model.ANY if said is None else said.model
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
        """A task of the session. Its end is the call's end."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: call.cancel())
        return task

    async def _receive(self, call: Call) -> None:
        batch = await call.read()
        if not isinstance(batch, detokenizer_pb2.TextBatch):
            raise StreamBroken("ended by peer")
        self.window.answered(batch)

    async def _write(self, call: Call) -> None:
        """Sends what has gathered since the last batch: at most one batch per event-loop tick."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (batch := self.window.next_batch()) is not None:
                    await call.write(batch)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, with its reason

    def _answers_due(self) -> int | None:
        return self.window.answers if self.window.in_flight else None


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
        patience: Patience,
        dialer: Dialer = IN_THE_CLEAR,
    ) -> None:
        """`addresses` until set_endpoints() is called. `changed` is called when connected() may have changed."""
        self._replicas = Replicas(self._make)
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._handles = handles
        self._retries = metrics.retries.labels("detokenizer")
        self._changed = changed
        self._patience = patience
        self._dialer = dialer
        self._homeless: dict[Decoding, None] = {}
        metrics.watch_connected("detokenizer", self.connected)
        self.set_endpoints(dict.fromkeys(addresses, True))

    def _make(self, address: str) -> DetokLink:
        return DetokLink(address, self._patience, self._up, self._down, self._replicas.retire, self._dialer)

    @property
    def links(self) -> list[DetokLink]:
        """Those that retire included."""
        return list(self._replicas.by_address.values())

    def connected(self, model: str = served_model.ANY) -> int:
        """Detokenizers that a new decoding could go to."""
        return sum(link.takes(model) for link in self.links)

    def stubs(self, model: str = served_model.ANY) -> list[detokenizer_pb2_grpc.DetokenizerStub]:
        """Of the usable detokenizers, for calls beside the streams."""
        return [link.stub for link in self.links if link.takes(model) and link.stub is not None]

    def set_endpoints(self, endpoints: Endpoints) -> None:
        """New ones are connected to. Those that are gone keep their decodings until these end or the stream breaks."""
        self._replicas.set_endpoints(endpoints)
        self._changed()
        self._house_waiting()

    async def run(self) -> None:
        """Keeps the streams up until cancelled. Once."""
        await self._replicas.run()

    def touch(self, decoding: Decoding) -> None:
        """`ids` has grown or the decoding is finished: its text will come."""
        if decoding.may_wait:
            return
        if decoding.stream is not None:
            decoding.stream.touch(decoding)
        elif decoding.homeless is None:
            self._house(decoding)

    def drop(self, decoding: Decoding) -> None:
        """No more text is wanted. Legal at any time, any number of times."""
        if decoding.homeless is not None:
            self._homeless.pop(decoding, None)
            decoding.homeless.cancel()
            decoding.homeless = None
        if decoding.stream is not None:
            decoding.stream.drop(decoding)

    def _link_for(self, decoding: Decoding) -> DetokLink | None:
        links = [link for link in self.links if link.takes(decoding.model)]
        return min(links, key=lambda link: len(link.window.open), default=None)

    def _house(self, decoding: Decoding) -> None:
        link = self._link_for(decoding)
        if link is not None:
            link.window.adopt(decoding, next(self._handles))
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
                link.window.adopt(decoding, next(self._handles))

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
