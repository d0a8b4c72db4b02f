"""The EncodeMany stream of one gateway: short requests, one task for each, with the finished ones sent together.

A task starts with an EncodeOpen. It ends with its response, with its handle in `closes`, or with the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from rootstock.v1 import tokenizer_pb2 as pb
from services.shared import limits
from services.shared.rpc.grpc_server import GOING_AWAY, GoingAway, MessageReader
from services.tokenizer.refusal import Refusal, busy

MESSAGE_BYTES = 1 << 20  # approximate size at which a message of responses is sent

logger = logging.getLogger(__name__)

Texts = Callable[[pb.EncodeRequest], Awaitable[pb.EncodeResponse]]  # raises Refusal
Chat = Callable[[pb.EncodeChatRequest], Awaitable[pb.EncodeResponse]]  # raises Refusal


class BadBatch(ValueError):
    """A message breaks the contract of tokenizer.proto; the stream must end."""


class EncodeStream:
    """The open requests of one stream and their unsent responses. Belongs to the stream's handler."""

    def __init__(self, context: grpc.aio.ServicerContext, texts: Texts, chat: Chat) -> None:
        self._context = context
        self._texts = texts
        self._chat = chat
        self._open: dict[int, asyncio.Task[None]] = {}  # by handle
        self._answers: list[pb.Encoded] = []  # responses that are not sent yet
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()  # set when no request is open and every response is sent

    async def serve(self, stopping: asyncio.Event) -> None:
        """Serves until the gateway ends the stream, or until `stopping` is set and all received requests are answered.

        Must be called once.
        """
        reader: MessageReader[pb.EncodeBatch] = MessageReader(self._context, stopping)
        writer = asyncio.create_task(self._write())
        try:
            if await reader.next() is not None:
                await self._context.write(pb.EncodedBatch())
            while (batch := await reader.next()) is not None:
                self._take(batch)
        except GoingAway:
            await self._until_settled()
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, GOING_AWAY)
        except BadBatch as error:
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.close()
            writer.cancel()
            for task in self._open.values():
                task.cancel()

    def _take(self, batch: pb.EncodeBatch) -> None:
        for opened in batch.opens:
            self._begin(opened)
        for handle in batch.closes:
            if (task := self._open.pop(handle, None)) is not None:
                task.cancel()

    def _begin(self, opened: pb.EncodeOpen) -> None:
        if opened.WhichOneof("request") is None or opened.handle in self._open:
            raise BadBatch("opens: each entry needs a request and a handle that no other open request has")
        if opened.ByteSize() > limits.SHORT_ENCODING_BYTES:
            raise BadBatch(f"opens: an entry is larger than {limits.SHORT_ENCODING_BYTES} bytes. Use a unary call for it.")
        if len(self._open) >= limits.MAX_OPEN_ENCODINGS:
            self._answer(
                _refused(
                    opened.handle, busy(f"opens: the stream already has {limits.MAX_OPEN_ENCODINGS} open requests, its limit")
                )
            )
        else:
            self._open[opened.handle] = asyncio.create_task(self._work(opened))

    async def _work(self, opened: pb.EncodeOpen) -> None:
        try:
            answering = self._texts(opened.texts) if opened.HasField("texts") else self._chat(opened.chat)
            answer = pb.Encoded(handle=opened.handle, response=await answering)
        except Refusal as refusal:
            answer = _refused(opened.handle, refusal)
        except Exception:
            logger.exception("encoding failed")
            answer = _refused(opened.handle, Refusal(grpc.StatusCode.INTERNAL, "the tokenizer failed"))
        del self._open[opened.handle]
        self._answer(answer)

    def _answer(self, answer: pb.Encoded) -> None:
        self._answers.append(answer)
        self._wake.set()

    async def _write(self) -> None:
        """Sends responses as they become available, until the task is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._answers:
                await self._context.write(self._next_message())
            if not self._open:
                self._settled.set()

    def _next_message(self) -> pb.EncodedBatch:
        message, size = pb.EncodedBatch(), 0
        taken = 0
        for answer in self._answers:
            message.rows.append(answer)
            taken, size = taken + 1, size + answer.ByteSize()
            if size > MESSAGE_BYTES:
                break
        del self._answers[:taken]
        return message

    async def _until_settled(self) -> None:
        self._settled.clear()
        self._wake.set()
        await self._settled.wait()


def _refused(handle: int, refusal: Refusal) -> pb.Encoded:
    return pb.Encoded(handle=handle, code=refusal.code.value[0], message=refusal.message)
