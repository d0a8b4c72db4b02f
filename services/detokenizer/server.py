"""The Detokenizer service: one Session per Decode stream, and calls for the texts of single tokens.

Small batches are answered on the event loop, large ones in a thread.
Freed on every end of a stream (client gone, bad batch, shutdown): its session and so all its requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import grpc

from rootstock.v1 import detokenizer_pb2 as pb
from rootstock.v1 import detokenizer_pb2_grpc as pb_grpc
from services.detokenizer.metrics import DetokenizerMetrics
from services.detokenizer.session import BadBatch, Session, TooManyOpen
from services.detokenizer.settings import DetokenizerSettings
from services.detokenizer.token_texts import TokenTexts
from services.shared import limits
from services.shared.hf_tokenizer import HfTokenizer
from services.shared.observe.log import fields

if TYPE_CHECKING:
    from services.shared.observe.spans import Tracing

GOING_AWAY = "the detokenizer is going away"
DRAIN_QUIET_S = 0.02  # without a batch, while stopping: nothing more was on its way
DRAIN_S = 0.2  # of reading on, while stopping

logger = logging.getLogger(__name__)


class DetokenizerServicer(pb_grpc.DetokenizerServicer):
    def __init__(
        self,
        tokenizer: HfTokenizer,
        settings: DetokenizerSettings,
        metrics: DetokenizerMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._settings = settings
        self._metrics = metrics
        self._tracing = tracing
        self._stopping = asyncio.Event()

    async def drain(self) -> None:
        """Ends every stream with UNAVAILABLE once what it has received is answered, so that gateways go on elsewhere at once."""
        self._stopping.set()

    async def Decode(self, _: object, context: grpc.aio.ServicerContext) -> None:
        if self._stopping.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, GOING_AWAY)
        session = Session(self._tokenizer, self._settings.max_open_requests, self._metrics, self._tracing)
        stopping = asyncio.create_task(self._last_read())
        self._metrics.streams.inc()
        logger.info("stream opened", extra=fields(peer=context.peer()))
        try:
            while (batch := await _next(context, stopping)) is not None:
                await context.write(await self._answer(session, batch))
        except BadBatch as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TooManyOpen as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            stopping.cancel()
            session.close()
            self._metrics.streams.dec()
            logger.info("stream closed", extra=fields(peer=context.peer()))

    async def _last_read(self) -> float:
        """Returns when the service stops: until when (time.monotonic) batches that were sent before may still come in."""
        await self._stopping.wait()
        return time.monotonic() + DRAIN_S

    async def TokenTexts(self, request: pb.TokenTextsRequest, context: grpc.aio.ServicerContext) -> pb.TokenTextsResponse:
        ids = request.token_ids
        if len(ids) > limits.MAX_TOKEN_TEXTS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"token_ids: at most {limits.MAX_TOKEN_TEXTS} in one call")
        if len(ids) <= self._settings.inline_tokens:
            return pb.TokenTextsResponse(texts=map(self._texts.of, ids))
        return await asyncio.to_thread(lambda: pb.TokenTextsResponse(texts=map(self._texts.of, ids)))

    async def Info(self, request: pb.DetokenizerInfoRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizerInfo:
        return pb.DetokenizerInfo(model=self._settings.model_name)

    async def _answer(self, session: Session, batch: pb.DecodeBatch) -> pb.TextBatch:
        tokens = len(batch.token_ids) + sum(len(opened.replay_ids) for opened in batch.opens)
        started = time.perf_counter()
        if tokens <= self._settings.inline_tokens:
            answer = session.answer(batch)
        else:
            # Shielded: a cancelled stream must not close the session under the thread that is using it.
            work = asyncio.ensure_future(asyncio.to_thread(session.answer, batch))
            try:
                answer = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])
                raise
        self._metrics.seconds.observe(time.perf_counter() - started)
        return answer


async def _next(context: grpc.aio.ServicerContext, stopping: asyncio.Task[float]) -> pb.DecodeBatch | None:
    """The next batch, or None at the end of the stream. Aborts the stream if the service is stopping."""
    read = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait([read, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not read.done() and time.monotonic() < stopping.result():
            await asyncio.wait([read], timeout=DRAIN_QUIET_S)
        if not read.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, GOING_AWAY)
        batch = read.result()
        return None if batch is grpc.aio.EOF else batch
    finally:
        read.cancel()
