"""The gateway's stream of short requests to one tokenizer. Requests of one event-loop tick share a message.

An EncodeStream is one gRPC call and does not reconnect. At its end, unanswered requests fail with UNAVAILABLE. Everything runs on
the event loop.
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

HANDLE_BYTES = 32  # upper limit of the bytes that an EncodeOpen adds to its request

Call = Duplex[tokenizer_pb2.EncodeBatch, tokenizer_pb2.EncodedBatch]
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class EncodeFailed(Exception):
    """The tokenizer has refused or failed a request, or has not answered it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        """Makes the error. `details` is the tokenizer's text."""
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class NotServed(StreamBroken):
    """The tokenizer has an older version without these streams."""


class EncodeStream:
    """The stream to one tokenizer. After retire(), it takes no new requests and ends with its last reply."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerStub, address: str, unreachable_s: float) -> None:
        self._address = address
        self._unreachable_s = unreachable_s
        self._answered = 0
        self._call: Call = stub.EncodeMany()
        self._handles = itertools.count(1)
        self._unanswered: dict[int, asyncio.Future[tokenizer_pb2.EncodeResponse]] = {}  # by handle
        self._opens: dict[int, EncodeCall] = {}  # requests of _unanswered that are not sent
        self._closes: list[int] = []  # handles of cancelled requests, to be sent
        self._wake = asyncio.Event()
        self._greeted = self._up = self._retiring = False

    def takes(self, request: EncodeCall) -> bool:
        """Returns whether encode() may be called for this request. Always False if the tokenizer lacks these streams."""
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
        """Stops new requests, and ends the stream after the last reply. May be called at any time, and again."""
        self._retiring = True
        if self._greeted and not self._unanswered:
            self._call.cancel()

    async def run(self) -> None:
        """Runs the stream until it ends. May be called once.

        Raises:
            StreamBroken: The stream has ended with unknown cause or a fault.
            NotServed: The tokenizer lacks these streams.
            CancelledError: The stream is retired and has ended, or the task is cancelled.
        """
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

    def _answers_due(self) -> int | None:
        """Returns the number of replies so far, or None if no reply is due."""
        return self._answered if self._unanswered else None

    def _forget(self, handle: int) -> None:
        if self._unanswered.pop(handle, None) is not None and self._opens.pop(handle, None) is None:
            self._closes.append(handle)
            self._wake.set()
        if self._retiring:
            self.retire()

    def _fail_all(self) -> None:
        """Fails all unanswered requests. Their encode() calls remove them."""
        for answer in self._unanswered.values():
            if not answer.done():
                answer.set_exception(EncodeFailed(grpc.StatusCode.UNAVAILABLE, "the stream has ended"))

    async def _receive(self) -> None:
        message = await self._call.read()
        if not isinstance(message, tokenizer_pb2.EncodedBatch):
            raise StreamBroken("ended by the tokenizer")
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
            # The reading task gets the reason.
            logger.debug("the stream ended during a write", extra=fields(address=self._address))
