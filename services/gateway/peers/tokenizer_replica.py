"""The client of one tokenizer: its channel, its health and its stream of short requests.

Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from rootstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.gateway.peers import served_model
from services.gateway.peers.encode_stream import EncodeFailed, EncodeStream, NotServed
from services.gateway.peers.reconnect import LastTold, StreamBroken
from services.gateway.peers.unary_call import answer_of
from services.gateway.request.trace import EncodeCall
from services.shared import limits
from services.shared.observe.log_fields import fields
from services.shared.output_formats import OutputFormats, known
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer
from services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

HUGE_AT_ONCE = 2  # large requests that are sent: one is tokenized, and the next one waits at the tokenizer
PAUSE_S = 0.25  # seconds between two Info calls to a tokenizer that does not respond


class TokenizerReplica:
    """The client of one tokenizer, which reconnects until its task is cancelled."""

    def __init__(self, address: str, unreachable_s: float, changed: Callable[[], None], dialer: Dialer = IN_THE_CLEAR) -> None:
        """Makes the replica.

        Args:
            unreachable_s: See Patience.unreachable.
            changed: Called when `connected` has changed.
        """
        self.address = address
        self.connected = False  # Info was answered on the present connection, and doubt() was not called since
        self.ready = True  # discovery allows new calls
        self.retiring = False  # discovery has dropped the address; the replica ends with its last call
        self.in_flight = 0  # running calls
        self.model = served_model.ANY  # by its last Info
        self.formats = OutputFormats()  # by its last Info
        self.reasoning_marks: tuple[int, ...] = ()  # by its last Info; ids of the opening and the closing mark
        self._unreachable_s = unreachable_s
        self._changed = changed
        self._doubted = asyncio.Event()
        self._told = LastTold()
        self._kept = dialer.kept(address, Role.TOKENIZER)
        self._channel = self._kept.now()
        self._stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._huge = asyncio.Semaphore(HUGE_AT_ONCE)
        self._stream: EncodeStream | None = None  # stream of the present connection
        self._streams: set[asyncio.Task[None]] = set()  # tasks of this stream and of earlier ones with unanswered requests

    @property
    def busy(self) -> bool:
        return self.in_flight > 0

    def serves(self, model: str) -> bool:
        return self.ready and served_model.serves(self.model, model)

    async def encode(self, request: EncodeCall, limit_s: float, alone: bool = False) -> tokenizer_pb2.EncodeResponse:
        """Sends a request: a short one on the stream, a long one in a unary call, so that it does not delay short ones.

        Args:
            limit_s: Time limit in seconds.
            alone: Sends a short request in a unary call too, because it may have caused the end of a stream.

        Raises:
            EncodeFailed: The request has failed or was refused.
        """
        if not alone and self._stream is not None and self._stream.takes(request):
            return await self._stream.encode(request, limit_s)
        if request.ByteSize() <= limits.HUGE_ENCODING_BYTES:
            return await self._call(request, limit_s)
        begun = asyncio.get_running_loop().time()
        await self._huge_turn(limit_s)
        try:
            return await self._call(request, limit_s - (asyncio.get_running_loop().time() - begun))
        finally:
            self._huge.release()

    async def _huge_turn(self, limit_s: float) -> None:
        """Waits for one of HUGE_AT_ONCE slots, because the tokenizer processes large requests one by one.

        Waiting requests stay at the gateway, where their bodies are charged already, and do not occupy memory at the tokenizer.
        """
        try:
            async with asyncio.timeout(min(limit_s, limits.MAX_ENCODING_WAIT_S)):
                await self._huge.acquire()
        except TimeoutError:
            raise EncodeFailed(grpc.StatusCode.ABORTED, "") from None

    async def _call(self, request: EncodeCall, limit_s: float) -> tokenizer_pb2.EncodeResponse:
        is_chat = isinstance(request, tokenizer_pb2.EncodeChatRequest)
        if not self._kept.may_connect:
            raise EncodeFailed(grpc.StatusCode.UNAVAILABLE, "the connection is about to be renewed")
        try:
            response: tokenizer_pb2.EncodeResponse
            encode = self._stub.EncodeChat if is_chat else self._stub.Encode
            response = await answer_of(partial(encode, request, timeout=limit_s))
            return response
        except StreamBroken as error:
            raise EncodeFailed(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        except grpc.aio.AioRpcError as error:
            raise EncodeFailed(error.code(), error.details() or "") from None

    def doubt(self) -> None:
        """Marks the replica as not connected until it answers Info, because it has left a call unanswered or is stopping."""
        self._doubted.set()
        self._set_connected(False)

    async def answers(self) -> bool:
        """Returns whether the tokenizer answers Info now, for a replica that has left a call unanswered."""
        if not self._kept.may_connect:
            return False
        try:
            await served_model.ask(self._info, self.address)
        except StreamBroken:
            return False
        return True

    def _info(self) -> Awaitable[tokenizer_pb2.TokenizerInfo]:
        info: Awaitable[tokenizer_pb2.TokenizerInfo] = self._stub.Info(
            tokenizer_pb2.TokenizerInfoRequest(), timeout=served_model.INFO_S
        )
        return info

    async def run(self) -> None:
        """Keeps the channel connected until cancelled."""
        try:
            while True:
                state = self._channel.get_state(try_to_connect=self._kept.may_connect)
                if state is grpc.ChannelConnectivity.READY:
                    await self._while_ready()
                else:
                    self._set_connected(False)
                    await self._kept.state_changed(state)
                    self._renew()
        finally:
            self._set_connected(False)
            for stream in self._streams:
                stream.cancel()
            await self._kept.close()

    def _renew(self) -> None:
        """Replaces the channel if its TLS files have changed."""
        if self._kept.may_connect:
            return
        self._channel = self._kept.now()
        self._stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)

    async def _while_ready(self) -> None:
        """Serves one connection. Returns when the channel is down or doubt() was called."""
        self._doubted.clear()
        try:
            self._learn(await served_model.ask(self._info, self.address))
        except StreamBroken as error:
            self._set_connected(False)
            if self._told.is_news(str(error), asyncio.get_running_loop().time()):
                logger.warning("tokenizer does not respond: %s", error, extra=fields(address=self.address))
            await asyncio.sleep(PAUSE_S)
            return
        self._set_connected(True)
        left = asyncio.create_task(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        doubted = asyncio.create_task(self._doubted.wait())
        stream = self._stream = EncodeStream(self._stub, self.address, self._unreachable_s)
        streaming = asyncio.create_task(self._while_streaming(stream))
        self._streams.add(streaming)
        streaming.add_done_callback(self._streams.discard)
        try:
            await asyncio.wait((left, doubted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stream.retire()
            left.cancel()
            doubted.cancel()

    async def _while_streaming(self, stream: EncodeStream) -> None:
        """Runs a stream. If it breaks, doubt() is called, and the next reply to Info starts a new stream."""
        try:
            await stream.run()
        except NotServed:
            logger.info("the tokenizer accepts only unary requests", extra=fields(address=self.address))
        except StreamBroken as error:
            logger.warning("stream ended: %s", error, extra=fields(peer="tokenizer", address=self.address))
            await asyncio.sleep(PAUSE_S)
            if self._stream is stream:
                self.doubt()

    def _learn(self, info: tokenizer_pb2.TokenizerInfo | None) -> None:
        self.model = served_model.ANY if info is None else info.model
        self.formats = OutputFormats() if info is None else known(info.tool_format, info.reasoning_format)
        self.reasoning_marks = () if info is None else tuple(info.reasoning_marks)

    def _set_connected(self, connected: bool) -> None:
        if connected is not self.connected:
            self.connected = connected
            message = "tokenizer connected" if connected else "tokenizer not connected"
            logger.info(message, extra=fields(address=self.address, model=self.model))
            self._changed()
