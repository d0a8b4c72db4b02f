"""The gateway's stream of short requests to one tokenizer: what is asked in one event-loop tick goes out in one message.

It lives once, from its connection to its end; then what is unanswered fails as if the tokenizer could not be reached. Everything
runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import grpc

from rootstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.gateway.peers.reconnect import Duplex, StreamBroken
from services.gateway.peers.silence import until_unreachable
from services.gateway.request.trace import EncodeCall
from services.shared import limits
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

HANDLE_BYTES = 32  # more than what an EncodeOpen has around its request

Call = Duplex[tokenizer_pb2.EncodeBatch, tokenizer_pb2.EncodedBatch]
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class EncodeFailed(Exception):
    """A tokenizer's answer that is none. details: of what it refused, its words."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class NotServed(StreamBroken):
    """The tokenizer is older than these streams."""


class EncodeStream:
    """retire(): it takes nothing new and ends with its last answer."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerStub, address: str, unreachable_s: float) -> None:
        self._address = address
        self._unreachable_s = unreachable_s
        self._answered = 0
        self._call: Call = stub.EncodeMany()
        self._handles = itertools.count(1)
        self._unanswered: dict[int, asyncio.Future[tokenizer_pb2.EncodeResponse]] = {}  # by handle
        self._opens: dict[int, EncodeCall] = {}  # those of them that are not sent yet
        self._closes: list[int] = []
        self._wake = asyncio.Event()
        self._greeted = self._up = self._retiring = False

    def takes(self, request: EncodeCall) -> bool:
        """Whether encode() may be called. A tokenizer that knows no such streams never gets that far."""
        fits = request.ByteSize() + HANDLE_BYTES <= limits.SHORT_ENCODING_BYTES
        return self._up and not self._retiring and fits and len(self._unanswered) < limits.MAX_OPEN_ENCODINGS

    async def encode(self, request: EncodeCall, limit_s: float) -> tokenizer_pb2.EncodeResponse:
        """Raises EncodeFailed. Cancelling it tells the tokenizer."""
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
        """Legal at any time, any number of times."""
        self._retiring = True
        if self._greeted and not self._unanswered:
            self._call.cancel()

    async def run(self) -> None:
        """Until it ends, cancelled where it is retired. Once. Raises StreamBroken."""
        helpers: list[asyncio.Task[Any]] = []
        try:
            await self._call.write(tokenizer_pb2.EncodeBatch())
            self._greeted = True  # a first write whose call is cancelled never ends (grpc.aio)
            if self._retiring:
                self.retire()
            await self._receive()
            self._up = True
            watcher = until_unreachable(self._address, self._unreachable_s, self._answers_due)
            helpers += [asyncio.create_task(work) for work in (self._write(), watcher)]
            for helper in helpers:
                helper.add_done_callback(lambda _: self._call.cancel())
            while True:
                await self._receive()
        except grpc.aio.AioRpcError as error:
            kind = NotServed if error.code() is grpc.StatusCode.UNIMPLEMENTED else StreamBroken
            raise kind(f"{error.code().name}: {error.details()}") from None
        except asyncio.InvalidStateError:
            raise StreamBroken("ended before it was written to") from None
        except asyncio.CancelledError:
            # grpc.aio raises it too, when either side has cancelled the call.
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

    def _answers_due(self) -> int | None:
        return self._answered if self._unanswered else None

    def _forget(self, handle: int) -> None:
        if self._unanswered.pop(handle, None) is not None and self._opens.pop(handle, None) is None:
            self._closes.append(handle)
            self._wake.set()
        if self._retiring:
            self.retire()

    def _fail_all(self) -> None:
        """Each is forgotten by whoever waits for it."""
        for answer in self._unanswered.values():
            if not answer.done():
                answer.set_exception(EncodeFailed(grpc.StatusCode.UNAVAILABLE, "the stream has ended"))

    async def _receive(self) -> None:
        message = await self._call.read()
        if not isinstance(message, tokenizer_pb2.EncodedBatch):
            raise StreamBroken("ended by peer")
        self._answered += 1
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
            logger.debug("the stream ended while written to", extra=fields(address=self._address))  # the reader has its reason
