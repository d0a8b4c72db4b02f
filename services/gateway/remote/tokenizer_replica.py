"""The client of one tokenizer: its channel, its health and its stream of short requests. Everything runs on the event loop.

Short requests of one event-loop tick share a message on the stream. A long request is a unary call, so that it does not delay
short requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from rootstock_llm.protos import tokenizer_pb2, tokenizer_pb2_grpc
from rootstock_llm.services.gateway.generation.trace import EncodeCall
from rootstock_llm.services.gateway.remote.connection import (
    ANY_MODEL,
    INFO_S,
    Duplex,
    LogLimiter,
    StreamBroken,
    request_info,
    response_of,
    serves_model,
    until_unreachable,
)
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.output_formats import OutputFormats, known
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

HUGE_AT_ONCE = 2  # large requests in flight per tokenizer: while one is tokenized, the next one already waits there
PAUSE_S = 0.25  # seconds between two Info calls to a tokenizer that does not respond
HANDLE_BYTES = 32  # upper limit of the bytes that an EncodeOpen adds to its request

Call = Duplex[tokenizer_pb2.EncodeBatch, tokenizer_pb2.EncodedBatch]
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class EncodeFailed(Exception):
    """The tokenizer has refused or failed a request, or has not responded within the time limit."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        """Makes the error. `details` is the tokenizer's text."""
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class NotServed(StreamBroken):
    """The tokenizer has an older version that does not serve EncodeMany."""


class EncodeStream:
    """The stream of short requests to one tokenizer. It is one gRPC call, which does not reconnect.

    If the call ends, requests without a response fail with UNAVAILABLE. After retire(), the stream takes no new requests, and
    ends after the last response.
    """

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerStub, address: str, unreachable_s: float) -> None:
        self._address = address
        self._unreachable_s = unreachable_s
        self._num_replies = 0
        self._call: Call = stub.EncodeMany()
        self._handles = itertools.count(1)
        self._unanswered: dict[int, asyncio.Future[tokenizer_pb2.EncodeResponse]] = {}  # by handle
        self._opens: dict[int, EncodeCall] = {}  # requests of _unanswered that are not sent
        self._closes: list[int] = []  # handles of cancelled requests, to be sent
        self._wake = asyncio.Event()
        self._greeted = self._up = self._retiring = False

    def takes(self, request: EncodeCall) -> bool:
        """Returns whether encode() may be called for this request. Always False if the tokenizer does not serve EncodeMany."""
        fits = request.ByteSize() + HANDLE_BYTES <= limits.SHORT_ENCODING_BYTES
        return self._up and not self._retiring and fits and len(self._unanswered) < limits.MAX_OPEN_ENCODINGS

    async def encode(self, request: EncodeCall, limit_s: float) -> tokenizer_pb2.EncodeResponse:
        """Sends a request and returns its response. If the caller is cancelled, the tokenizer drops the request.

        Raises:
            EncodeFailed: The tokenizer has refused the request, the stream has ended, or `limit_s` seconds have passed.
        """
        handle = next(self._handles)
        answer: asyncio.Future[tokenizer_pb2.EncodeResponse] = asyncio.get_running_loop().create_future()
        self._unanswered[handle], self._opens[handle] = answer, request
        self._wake.set()
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise EncodeFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "") from None
        finally:
            self._forget(handle)

    def retire(self) -> None:
        """Accepts no more requests, and ends the stream after the last response. Idempotent; may be called in any state."""
        self._retiring = True
        if self._greeted and not self._unanswered:
            self._call.cancel()

    async def run(self) -> None:
        """Runs the stream until it ends. May be called once.

        Raises:
            StreamBroken: The stream has failed, or the tokenizer has ended it.
            NotServed: The tokenizer does not serve EncodeMany.
            CancelledError: The stream has ended after retire(), or the task is cancelled.
        """
        helpers: list[asyncio.Task[Any]] = []
        try:
            await self._call.write(tokenizer_pb2.EncodeBatch())
            # retire() cancels the call only after this, because in grpc.aio, the first write of a cancelled call never ends.
            self._greeted = True
            if self._retiring:
                self.retire()
            await self._receive()
            self._up = True
            watcher = until_unreachable(self._address, self._unreachable_s, self._replies_due)
            helpers += [asyncio.create_task(work) for work in (self._write(), watcher)]
            for helper in helpers:
                helper.add_done_callback(lambda _: self._call.cancel())
            while True:
                await self._receive()
        except grpc.aio.AioRpcError as error:
            kind = NotServed if error.code() is grpc.StatusCode.UNIMPLEMENTED else StreamBroken
            raise kind(f"{error.code().name}: {error.details()}") from None
        except asyncio.InvalidStateError:
            raise StreamBroken("ended before the first write") from None
        except asyncio.CancelledError:
            # grpc.aio also raises CancelledError if either side has cancelled the call.
            task = asyncio.current_task()
            if self._retiring or task is None or task.cancelling():
                raise
            raise StreamBroken("cancelled") from None
        finally:
            for helper in helpers:
                helper.cancel()
            self._call.cancel()
            self._up = False
            self._fail_all()

    def _replies_due(self) -> int | None:
        """Returns the number of replies so far, or None if no reply is due."""
        return self._num_replies if self._unanswered else None

    def _forget(self, handle: int) -> None:
        if self._unanswered.pop(handle, None) is not None and self._opens.pop(handle, None) is None:
            self._closes.append(handle)
            self._wake.set()
        if self._retiring:
            self.retire()

    def _fail_all(self) -> None:
        """Fails all unanswered requests. The encode() call of each request removes it."""
        for answer in self._unanswered.values():
            if not answer.done():
                answer.set_exception(EncodeFailed(grpc.StatusCode.UNAVAILABLE, "the stream has ended"))

    async def _receive(self) -> None:
        message = await self._call.read()
        if not isinstance(message, tokenizer_pb2.EncodedBatch):
            raise StreamBroken("the tokenizer has ended the stream")
        self._num_replies += 1
        for row in message.rows:
            answer = self._unanswered.pop(row.handle, None)
            if answer is None or answer.done():
                continue
            if row.code:
                code = _STATUS.get(row.code, grpc.StatusCode.UNKNOWN)
                answer.set_exception(EncodeFailed(code, row.message))
            else:
                answer.set_result(row.response)

    def _next_message(self) -> tokenizer_pb2.EncodeBatch:
        message = tokenizer_pb2.EncodeBatch(closes=self._closes)
        self._closes.clear()
        for handle, request in self._opens.items():
            if isinstance(request, tokenizer_pb2.EncodeRequest):
                message.opens.add(handle=handle, texts=request)
            else:
                message.opens.add(handle=handle, chat=request)
        self._opens.clear()
        return message

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._opens or self._closes:
                    await self._call.write(self._next_message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reading task raises the reason.
            logger.debug("the stream ended during a write", extra=fields(address=self._address))


class TokenizerReplica:
    """The client of one tokenizer, which reconnects until its task is cancelled."""

    def __init__(self, address: str, unreachable_s: float, changed: Callable[[], None], dialer: Dialer = PLAINTEXT) -> None:
        """Makes the replica.

        Args:
            unreachable_s: See Patience.unreachable.
            changed: Called when `connected` has changed.
        """
        self.address = address
        self.connected = False  # the tokenizer has responded to Info on this connection, and doubt() was not called since then
        self.ready = True  # discovery allows new calls
        self.retiring = False  # discovery has dropped the address; the replica ends with its last call
        self.in_flight = 0  # number of running calls
        # Values of the last response to Info
        self.model = ANY_MODEL
        self.formats = OutputFormats()
        self.reasoning_marks: tuple[int, ...] = ()  # token ids of the opening and the closing mark of reasoning
        self._unreachable_s = unreachable_s
        self._changed = changed
        self._doubted = asyncio.Event()
        self._log_limiter = LogLimiter()
        self._kept = dialer.long_lived_channel(address, Role.TOKENIZER)
        self._channel = self._kept.now()
        self._stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._huge = asyncio.Semaphore(HUGE_AT_ONCE)
        self._stream: EncodeStream | None = None  # stream of the current connection
        self._streams: set[asyncio.Task[None]] = set()  # tasks of _stream, and of retired streams that wait for responses

    @property
    def busy(self) -> bool:
        return self.in_flight > 0

    def serves(self, model: str) -> bool:
        return self.ready and serves_model(self.model, model)

    async def encode(self, request: EncodeCall, limit_s: float, alone: bool = False) -> tokenizer_pb2.EncodeResponse:
        """Sends a short request on the stream, and a long request in a unary call.

        Args:
            limit_s: Time limit in seconds.
            alone: Whether to send even a short request in a unary call, because the request may have ended an earlier stream.

        Raises:
            EncodeFailed: The request has failed or was refused.
        """
        if not alone and self._stream is not None and self._stream.takes(request):
            return await self._stream.encode(request, limit_s)
        if request.ByteSize() <= limits.HUGE_ENCODING_BYTES:
            return await self._call(request, limit_s)
        begun = asyncio.get_running_loop().time()
        await self._acquire_huge_slot(limit_s)
        try:
            return await self._call(request, limit_s - (asyncio.get_running_loop().time() - begun))
        finally:
            self._huge.release()

    async def _acquire_huge_slot(self, limit_s: float) -> None:
        """Waits for one of HUGE_AT_ONCE slots, because the tokenizer processes one large request at a time.

        A waiting request needs no memory at the tokenizer. At the gateway, the body budget already counts its body.
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
            response = await response_of(partial(encode, request, timeout=limit_s))
            return response
        except StreamBroken as error:
            raise EncodeFailed(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        except grpc.aio.AioRpcError as error:
            raise EncodeFailed(error.code(), error.details() or "") from None

    def doubt(self) -> None:
        """Marks the replica as not connected until it responds to Info. Called if a call has failed or got no response."""
        self._doubted.set()
        self._set_connected(False)

    async def responds(self) -> bool:
        """Returns whether the tokenizer responds to Info now. Called after a call has reached its time limit."""
        if not self._kept.may_connect:
            return False
        try:
            await request_info(self._info, self.address)
        except StreamBroken:
            return False
        return True

    def _info(self) -> Awaitable[tokenizer_pb2.TokenizerInfo]:
        info: Awaitable[tokenizer_pb2.TokenizerInfo] = self._stub.Info(tokenizer_pb2.TokenizerInfoRequest(), timeout=INFO_S)
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
            self._apply_info(await request_info(self._info, self.address))
        except StreamBroken as error:
            self._set_connected(False)
            if self._log_limiter.should_log(str(error), asyncio.get_running_loop().time()):
                logger.warning("tokenizer does not respond: %s", error, extra=fields(address=self.address))
            await asyncio.sleep(PAUSE_S)
            return
        self._set_connected(True)
        disconnected = asyncio.create_task(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        doubted = asyncio.create_task(self._doubted.wait())
        stream = self._stream = EncodeStream(self._stub, self.address, self._unreachable_s)
        streaming = asyncio.create_task(self._while_streaming(stream))
        self._streams.add(streaming)
        streaming.add_done_callback(self._streams.discard)
        try:
            await asyncio.wait((disconnected, doubted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stream.retire()
            disconnected.cancel()
            doubted.cancel()

    async def _while_streaming(self, stream: EncodeStream) -> None:
        """Runs a stream. If the stream breaks, calls doubt(). The next response to Info then starts a new stream."""
        try:
            await stream.run()
        except NotServed:
            logger.info("the tokenizer accepts only unary requests", extra=fields(address=self.address))
        except StreamBroken as error:
            logger.warning("stream ended: %s", error, extra=fields(peer="tokenizer", address=self.address))
            await asyncio.sleep(PAUSE_S)
            if self._stream is stream:
                self.doubt()

    def _apply_info(self, info: tokenizer_pb2.TokenizerInfo | None) -> None:
        self.model = ANY_MODEL if info is None else info.model
        self.formats = OutputFormats() if info is None else known(info.tool_format, info.reasoning_format)
        self.reasoning_marks = () if info is None else tuple(info.reasoning_marks)

    def _set_connected(self, connected: bool) -> None:
        if connected is not self.connected:
            self.connected = connected
            message = "tokenizer connected" if connected else "tokenizer not connected"
            logger.info(message, extra=fields(address=self.address, model=self.model))
            self._changed()
