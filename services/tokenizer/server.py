"""The Tokenizer service: checks requests, and passes chats to rendering processes and texts to encoding threads.

The service has no state between calls. Long requests have a separate byte budget and a separate encoding thread, so that a huge
prompt does not delay short requests. While a request waits for its share of the budget, only its message is in memory; its texts
are unpacked afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import grpc

from rootstock_llm.protos import tokenizer_pb2 as pb
from rootstock_llm.protos import tokenizer_pb2_grpc as pb_grpc
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.shared.index.prefix_index import HASH_BYTES, block_hashes
from rootstock_llm.services.shared.observe.log_fields import fields, trace_fields
from rootstock_llm.services.shared.rpc.grpc_server import GOING_AWAY, GoingAway, MessageReader
from rootstock_llm.services.tokenizer.encoding import EncodedText, EncodeJob, EncodeQueue, PieceEncoder, UncuttableText
from rootstock_llm.services.tokenizer.memory import ByteBudget, HeapTrimmer
from rootstock_llm.services.tokenizer.metrics import TokenizerMetrics
from rootstock_llm.services.tokenizer.refusal import Refusal, busy, invalid, too_much
from rootstock_llm.services.tokenizer.render_pool import RenderPool, RenderSetup, request_bytes
from rootstock_llm.services.tokenizer.settings import TokenizerSettings

if TYPE_CHECKING:
    from rootstock_llm.services.shared.observe.spans import Span, Tracing

R = TypeVar("R", pb.EncodeRequest, pb.EncodeChatRequest)
Texts = Callable[[pb.EncodeRequest], Awaitable[pb.EncodeResponse]]  # raises Refusal
Chat = Callable[[pb.EncodeChatRequest], Awaitable[pb.EncodeResponse]]  # raises Refusal

MAX_BYTES_PER_CHAR = 6  # JSON writes a character in at most 6 bytes, \uXXXX
RENDERED_END_CHARS = 64  # length of EncodeResponse.rendered_end; no delimiter of an output format is longer
# Largest response, in ids, that is hashed and packed on the event loop, in about 0.2 ms. A thread handles larger responses.
INLINE_TOKENS = 2048
MESSAGE_BYTES = 1 << 20  # approximate size in bytes at which a message of responses is sent
# Status codes with which a request's span counts as failed.
_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

logger = logging.getLogger(__name__)


class TokenizerServicer(pb_grpc.TokenizerServicer):
    def __init__(
        self, tokenizer: HfTokenizer, settings: TokenizerSettings, metrics: TokenizerMetrics, tracing: Tracing | None = None
    ) -> None:
        self._settings = settings
        self._formats = settings.output_formats(tokenizer.chat_templates)
        marks = [tokenizer.token_id(mark) for mark in self._formats.reasoning_pair]
        self._reasoning_marks = [mark for mark in marks if mark is not None] if None not in marks else []
        self._metrics = metrics
        self._tracing = tracing
        self._executor = ThreadPoolExecutor(settings.encode_threads + 1, thread_name_prefix="encode")
        self._queue = EncodeQueue(
            tokenizer.encode_batch,
            self._executor,
            lanes=settings.encode_threads,
            max_texts=settings.max_batch_texts,
            max_chars=settings.max_batch_chars,
            observe_texts=metrics.batch_texts.observe,
        )
        self._pieces = PieceEncoder(tokenizer)
        self._long_lane = asyncio.Semaphore(1)
        self._stopping = asyncio.Event()
        self._short_budget = ByteBudget(settings.max_encoding_bytes, settings.encoding_wait_s)
        self._long_budget = ByteBudget(settings.max_encoding_bytes, settings.encoding_wait_s)
        metrics.watch_bytes("short", lambda: self._short_budget.used)
        metrics.watch_bytes("long", lambda: self._long_budget.used)
        self._heap = HeapTrimmer(self._executor)
        setup = RenderSetup(
            templates=tokenizer.chat_templates,
            special_tokens=tokenizer.special_tokens,
            max_chars=settings.max_request_chars,
            max_messages=limits.MAX_CHAT_MESSAGES,
            memory_bytes=settings.render_memory_bytes,
            seconds=settings.render_seconds,
        )
        self._renderers = RenderPool(setup, settings.render_processes, metrics)

    async def start(self) -> None:
        await self._renderers.start()

    async def stop(self) -> None:
        self._heap.stop()
        await self._renderers.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Makes every stream serve the received requests and then end with UNAVAILABLE. Gateways then use other replicas."""
        self._stopping.set()

    async def Encode(self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
        return await _or_abort(self._texts(request), context)

    async def EncodeChat(self, request: pb.EncodeChatRequest, context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
        return await _or_abort(self._chat(request), context)

    async def EncodeMany(self, _: object, context: grpc.aio.ServicerContext) -> None:
        await EncodeStream(context, self._texts, self._chat).serve(self._stopping)

    async def Info(self, request: pb.TokenizerInfoRequest, context: grpc.aio.ServicerContext) -> pb.TokenizerInfo:
        formats = self._formats
        return pb.TokenizerInfo(
            model=self._settings.model_name,
            tool_format=formats.tools,
            reasoning_format=formats.reasoning,
            reasoning_marks=self._reasoning_marks,
        )

    async def _texts(self, request: pb.EncodeRequest) -> pb.EncodeResponse:
        return await self._serve("Encode", request, self._encode_texts)

    async def _chat(self, request: pb.EncodeChatRequest) -> pb.EncodeResponse:
        return await self._serve("EncodeChat", request, self._encode_chat)

    async def _serve(
        self, rpc: str, request: R, work: Callable[[R, Span | None], Awaitable[pb.EncodeResponse]]
    ) -> pb.EncodeResponse:
        """Counts, traces and logs a request. Raises Refusal for every failure."""
        started, code, message = time.perf_counter(), grpc.StatusCode.OK, ""
        ids = {"request_id": request.request_id[: limits.MAX_REQUEST_ID_CHARS], **trace_fields(request.traceparent)}
        span = None if self._tracing is None else _begin_span(self._tracing, rpc, request.request_id, request.traceparent)
        self._metrics.in_flight.inc()
        try:
            return await work(request, span)
        except Refusal as refusal:
            code, message = refusal.code, refusal.message
            # The message is not logged, because a template's own message may quote the prompt.
            logger.info("request refused", extra=fields(rpc=rpc, **ids, code=code.name))
            raise
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code, message = grpc.StatusCode.INTERNAL, "the tokenizer failed"
            logger.exception("request failed", extra=fields(rpc=rpc, **ids))
            raise Refusal(code, message) from None
        finally:
            seconds = time.perf_counter() - started
            if span is not None:
                _end_span(span, code, message)
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(rpc, code.name).inc()
            self._metrics.seconds.labels(rpc).observe(seconds)
            logger.debug("request", extra=fields(rpc=rpc, **ids, code=code.name, seconds=round(seconds, 6)))

    async def _encode_texts(self, request: pb.EncodeRequest, span: Span | None) -> pb.EncodeResponse:
        _check_request_id(request.request_id)
        _check_hash_root(request.hash_root)
        if not request.texts:
            raise invalid("texts: must have at least one text")
        if len(request.texts) > limits.MAX_BATCH_PROMPTS:
            raise too_much(f"texts: {len(request.texts)} texts, at most {limits.MAX_BATCH_PROMPTS}")
        async with self._share(request.ByteSize()):
            return await self._encode(list(request.texts), _adds_special_tokens(request), request, span)

    async def _encode_chat(self, request: pb.EncodeChatRequest, span: Span | None) -> pb.EncodeResponse:
        _check_request_id(request.request_id)
        _check_hash_root(request.hash_root)
        size = request_bytes(request)
        if size > self._settings.max_request_chars * MAX_BYTES_PER_CHAR:
            limit = self._settings.max_request_chars * MAX_BYTES_PER_CHAR
            raise too_much(f"messages_json: {size} bytes with tools and template_kwargs, at most {limit}")
        if request.continue_final_message and request.HasField("add_generation_prompt") and request.add_generation_prompt:
            raise invalid("continue_final_message: cannot be set together with add_generation_prompt")
        async with self._share(size):
            with _child_span(span, "render"):
                text = await self._renderers.render(request)
            # The template has already written the special tokens.
            response = await self._encode([text], False, request, span)
        response.rendered_end = text[-RENDERED_END_CHARS:]
        return response

    @asynccontextmanager
    async def _share(self, size: int) -> AsyncIterator[None]:
        """Waits for a share of the budget of short or long requests, which is returned when the context ends. Raises Refusal."""
        is_long = size > self._settings.max_batch_chars
        try:
            async with (self._long_budget if is_long else self._short_budget).share(size):
                if is_long:
                    await self._heap.trim()
                yield
        finally:
            if is_long:
                self._heap.trim_later()

    async def _encode(self, texts: Sequence[str], add_special_tokens: bool, request: R, span: Span | None) -> pb.EncodeResponse:
        job = EncodeJob(texts, add_special_tokens, request.max_tokens, request.cuts)
        chars = job.chars
        if chars > self._settings.max_request_chars:
            raise too_much(f"texts: {chars} characters, at most {self._settings.max_request_chars}")
        is_short = chars <= self._settings.max_batch_chars
        with _child_span(span, "encode", {"rootstock.texts": len(texts), "rootstock.chars": chars}):
            prompts = await (self._queue.encode(job) if is_short else self._encode_long(job))
        tokens = sum(len(prompt.ids) for prompt in prompts)
        if span is not None:
            span.set({"rootstock.tokens": tokens})
        self._metrics.tokens.inc(tokens)
        if tokens <= INLINE_TOKENS:
            return _response(prompts, request.hash_root)
        return await asyncio.get_running_loop().run_in_executor(self._executor, _response, prompts, request.hash_root)

    async def _encode_long(self, job: EncodeJob) -> list[EncodedText]:
        """Encodes a long request in pieces, one request at a time. Raises Refusal."""
        stopped = Event()
        async with self._long_lane:
            encoding = asyncio.get_running_loop().run_in_executor(self._executor, self._pieces.encode, job, stopped)
            try:
                return await asyncio.shield(encoding)
            except UncuttableText:
                raise too_much(
                    f"texts: a text has more than {limits.MAX_WORD_CHARS} characters without a position at which it may be cut"
                ) from None
            except asyncio.CancelledError:
                stopped.set()
                await asyncio.wait([encoding])  # the thread ends after its current piece; then the next request may start
                raise


def _begin_span(tracing: Tracing, rpc: str, request_id: str, traceparent: str) -> Span | None:
    """Starts the span of a request. Returns None if the request is not traced."""
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": "rootstock.v1.Tokenizer",
        "rpc.method": rpc,
        "rootstock.request_id": request_id,
    }
    return tracing.under(rpc, traceparent, attributes)


def _end_span(span: Span, code: grpc.StatusCode, message: str) -> None:
    span.set({"rpc.grpc.status_code": code.value[0]})
    if code in _FAULTS:
        span.fail(code.name, message)
    elif code is not grpc.StatusCode.OK:
        span.set({"error.type": code.name})
    span.end()


@contextmanager
def _child_span(span: Span | None, name: str, attributes: Mapping[str, int] | None = None) -> Iterator[None]:
    """Adds a child span for the work within the context. Does nothing if the request is not traced."""
    child = None if span is None else span.child(name, attributes)
    try:
        yield
    finally:
        if child is not None:
            child.end()


async def _or_abort(response: Awaitable[pb.EncodeResponse], context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
    try:
        return await response
    except Refusal as refusal:
        await context.abort(refusal.code, refusal.message)
        raise AssertionError("abort raises") from None


def _adds_special_tokens(request: pb.EncodeRequest) -> bool:
    return request.add_special_tokens if request.HasField("add_special_tokens") else True


def _response(prompts: Sequence[EncodedText], hash_root: bytes) -> pb.EncodeResponse:
    found = pb.EncodeResponse()
    for prompt in prompts:
        hashes = block_hashes(hash_root, prompt.ids) if hash_root else b""
        found.prompts.add(ids=prompt.ids, block_hashes=hashes, at_least=prompt.at_least)
    return found


def _check_request_id(request_id: str) -> None:
    if len(request_id) > limits.MAX_REQUEST_ID_CHARS:
        raise invalid(f"request_id: longer than {limits.MAX_REQUEST_ID_CHARS} characters")


def _check_hash_root(hash_root: bytes) -> None:
    if len(hash_root) not in (0, HASH_BYTES):
        raise invalid(f"hash_root: must have {HASH_BYTES} bytes, not {len(hash_root)}")


class BadBatch(ValueError):
    """A message violates the contract of tokenizer.proto; the stream must end."""


class EncodeStream:
    """The EncodeMany stream of one gateway: its open requests and their unsent responses. The stream's handler owns it.

    Each request has a task, and the responses of finished tasks are sent together. EncodeOpen starts a task. The task ends when
    its response is ready, when its handle is in `closes`, or when the stream ends.
    """

    def __init__(self, context: grpc.aio.ServicerContext, texts: Texts, chat: Chat) -> None:
        self._context = context
        self._texts = texts
        self._chat = chat
        self._open: dict[int, asyncio.Task[None]] = {}  # by handle
        self._unsent: list[pb.Encoded] = []  # responses that are not sent yet
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()  # set while no request is open and every response was sent

    async def serve(self, stopping: asyncio.Event) -> None:
        """Serves until the gateway ends the stream, or until `stopping` is set and all received requests have a response.

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
            raise BadBatch("opens: each entry must have a request, and a handle that no other open request has")
        if opened.ByteSize() > limits.SHORT_ENCODING_BYTES:
            raise BadBatch(f"opens: an entry is larger than {limits.SHORT_ENCODING_BYTES} bytes. Use a unary call for it.")
        if len(self._open) >= limits.MAX_OPEN_ENCODINGS:
            self._queue_response(
                _refused(
                    opened.handle,
                    busy(f"opens: the stream already has {limits.MAX_OPEN_ENCODINGS} open requests, which is the limit"),
                )
            )
        else:
            self._open[opened.handle] = asyncio.create_task(self._work(opened))

    async def _work(self, opened: pb.EncodeOpen) -> None:
        try:
            pending = self._texts(opened.texts) if opened.HasField("texts") else self._chat(opened.chat)
            response = pb.Encoded(handle=opened.handle, response=await pending)
        except Refusal as refusal:
            response = _refused(opened.handle, refusal)
        except Exception:
            logger.exception("encoding failed")
            response = _refused(opened.handle, Refusal(grpc.StatusCode.INTERNAL, "the tokenizer failed"))
        del self._open[opened.handle]
        self._queue_response(response)

    def _queue_response(self, response: pb.Encoded) -> None:
        self._unsent.append(response)
        self._wake.set()

    async def _write(self) -> None:
        """Sends responses as they become available, until the task is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent:
                await self._context.write(self._next_message())
            if not self._open:
                self._settled.set()

    def _next_message(self) -> pb.EncodedBatch:
        message, size = pb.EncodedBatch(), 0
        taken = 0
        for response in self._unsent:
            message.rows.append(response)
            taken, size = taken + 1, size + response.ByteSize()
            if size > MESSAGE_BYTES:
                break
        del self._unsent[:taken]
        return message

    async def _until_settled(self) -> None:
        self._settled.clear()
        self._wake.set()
        await self._settled.wait()


def _refused(handle: int, refusal: Refusal) -> pb.Encoded:
    return pb.Encoded(handle=handle, code=refusal.code.value[0], message=refusal.message)
