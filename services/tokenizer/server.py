"""The Tokenizer service: checks a request, has its template rendered and its texts encoded, all off the event loop.

Nothing is kept between calls. Long requests have a budget of bytes and a lane of their own, so that a huge prompt delays no
other. While a request waits for its share, its message alone is held: texts are unpacked when it has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import grpc

from rootstock.v1 import tokenizer_pb2 as pb
from rootstock.v1 import tokenizer_pb2_grpc as pb_grpc
from services.shared import limits
from services.shared.hf_tokenizer import HfTokenizer
from services.shared.index.block_hash import HASH_BYTES, block_hashes
from services.shared.observe.log_fields import fields
from services.shared.observe.tracing import trace_fields
from services.tokenizer.byte_budget import ByteBudget
from services.tokenizer.call_spans import begin_call, end_call, part
from services.tokenizer.encode_queue import EncodeQueue
from services.tokenizer.encode_stream import EncodeStream
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.pieces.piece_encoder import Encoded, NoPlaceToCut, PieceEncoder, Wanted, limited
from services.tokenizer.refusal import Refusal, invalid, too_much
from services.tokenizer.render_pool import RenderJob, RenderPool, RenderSetup
from services.tokenizer.returned_memory import ReturnedMemory
from services.tokenizer.settings import TokenizerSettings

if TYPE_CHECKING:
    from services.shared.observe.spans import Span, Tracing

R = TypeVar("R", pb.EncodeRequest, pb.EncodeChatRequest)

MAX_BYTES_PER_CHAR = 6  # of JSON: \uXXXX
RENDERED_END_CHARS = 64  # of a rendered chat that its gateway is told: more than any mark of a model has
INLINE_TOKENS = 2048  # up to which an answer is hashed and packed on the event loop: some 0.2 ms

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
        metrics.watch_bytes("short", lambda: self._short_budget.held)
        metrics.watch_bytes("long", lambda: self._long_budget.held)
        self._memory = ReturnedMemory(self._executor)
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
        self._memory.stop()
        await self._renderers.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Ends every stream with UNAVAILABLE once what it has received is answered, so that gateways go on elsewhere at once."""
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
        """Counts, traces and logs a request. Raises Refusal, whatever went wrong."""
        started, code, message = time.perf_counter(), grpc.StatusCode.OK, ""
        who = {"request_id": request.request_id[: limits.MAX_REQUEST_ID_CHARS], **trace_fields(request.traceparent)}
        span = None if self._tracing is None else begin_call(self._tracing, rpc, request.request_id, request.traceparent)
        self._metrics.in_flight.inc()
        try:
            return await work(request, span)
        except Refusal as refusal:
            code, message = refusal.code, refusal.message
            logger.info("refused", extra=fields(rpc=rpc, **who, code=code.name))  # a template's words may be the client's
            raise
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            code, message = grpc.StatusCode.INTERNAL, "the tokenizer failed"
            logger.exception("call failed", extra=fields(rpc=rpc, **who))
            raise Refusal(code, message) from None
        finally:
            seconds = time.perf_counter() - started
            if span is not None:
                end_call(span, code, message)
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(rpc, code.name).inc()
            self._metrics.seconds.labels(rpc).observe(seconds)
            logger.debug("call", extra=fields(rpc=rpc, **who, code=code.name, seconds=round(seconds, 6)))

    async def _encode_texts(self, request: pb.EncodeRequest, span: Span | None) -> pb.EncodeResponse:
        _check_request_id(request.request_id)
        _check_hash_root(request.hash_root)
        if not request.texts:
            raise invalid("texts: empty")
        if len(request.texts) > limits.MAX_BATCH_PROMPTS:
            raise too_much(f"texts: {len(request.texts)} texts, at most {limits.MAX_BATCH_PROMPTS}")
        async with self._share(request.ByteSize()):
            return await self._encode(list(request.texts), _adds_special_tokens(request), request, span)

    async def _encode_chat(self, request: pb.EncodeChatRequest, span: Span | None) -> pb.EncodeResponse:
        _check_request_id(request.request_id)
        _check_hash_root(request.hash_root)
        size = len(request.messages_json) + len(request.tools_json) + len(request.template_kwargs_json)
        if size > self._settings.max_request_chars * MAX_BYTES_PER_CHAR:
            raise too_much(f"messages_json: {size} bytes with tools and template_kwargs")
        continues = request.continue_final_message
        if continues and request.HasField("add_generation_prompt") and request.add_generation_prompt:
            raise invalid("continue_final_message: cannot be set together with add_generation_prompt")
        async with self._share(size):
            text = await self._rendered(request, span)
            # A template writes its own special tokens.
            response = await self._encode([text], False, request, span)
        response.rendered_end = text[-RENDERED_END_CHARS:]
        return response

    async def _rendered(self, request: pb.EncodeChatRequest, span: Span | None) -> str:
        continues = request.continue_final_message
        starts = request.add_generation_prompt if request.HasField("add_generation_prompt") else not continues
        names = tuple(request.read_variables)
        job = RenderJob(request.messages_json, request.tools_json, request.template_kwargs_json, starts, continues, names)
        with part(span, "render"):
            return await self._renderers.render(job)

    @asynccontextmanager
    async def _share(self, size: int) -> AsyncIterator[None]:
        """Of what is worked on at the same time. Raises Refusal."""
        is_long = size > self._settings.max_batch_chars
        try:
            async with (self._long_budget if is_long else self._short_budget).hold(size):
                if is_long:
                    await self._memory.now()
                yield
        finally:
            if is_long:
                self._memory.soon()

    async def _encode(self, texts: Sequence[str], add_special_tokens: bool, request: R, span: Span | None) -> pb.EncodeResponse:
        chars = sum(map(len, texts))
        if chars > self._settings.max_request_chars:
            raise too_much(f"texts: {chars} characters, at most {self._settings.max_request_chars}")
        wanted = Wanted(request.max_tokens, request.cuts)
        with part(span, "encode", {"rootstock.texts": len(texts), "rootstock.chars": chars}):
            if chars <= self._settings.max_batch_chars:
                prompts = [limited(ids, wanted) for ids in await self._queue.encode(texts, add_special_tokens)]
            else:
                prompts = await self._encode_long(texts, add_special_tokens, wanted)
        tokens = sum(len(prompt.ids) for prompt in prompts)
        if span is not None:
            span.set({"rootstock.tokens": tokens})
        self._metrics.tokens.inc(tokens)
        if tokens <= INLINE_TOKENS:
            return _response(prompts, request.hash_root)
        return await asyncio.get_running_loop().run_in_executor(self._executor, _response, prompts, request.hash_root)

    async def _encode_long(self, texts: Sequence[str], add_special_tokens: bool, wanted: Wanted) -> list[Encoded]:
        """One such request at a time. Raises Refusal."""
        stopped = Event()

        def work() -> list[Encoded]:
            return self._pieces.encode_all(texts, add_special_tokens, wanted, stopped)

        async with self._long_lane:
            encoding = asyncio.get_running_loop().run_in_executor(self._executor, work)
            try:
                return await asyncio.shield(encoding)
            except NoPlaceToCut:
                raise too_much(f"texts: more than {limits.MAX_WORD_CHARS} characters that cannot be cut into pieces") from None
            except asyncio.CancelledError:
                stopped.set()
                await asyncio.wait([encoding])  # it ends with its piece, and keeps the lane and its share until then
                raise


async def _or_abort(answer: Awaitable[pb.EncodeResponse], context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
    try:
        return await answer
    except Refusal as refusal:
        await context.abort(refusal.code, refusal.message)
        raise AssertionError("abort raises") from None


def _adds_special_tokens(request: pb.EncodeRequest) -> bool:
    return request.add_special_tokens if request.HasField("add_special_tokens") else True


def _response(prompts: Sequence[Encoded], hash_root: bytes) -> pb.EncodeResponse:
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
        raise invalid(f"hash_root: {len(hash_root)} bytes, {HASH_BYTES} are wanted")
