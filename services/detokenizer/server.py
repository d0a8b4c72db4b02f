"""The Detokenizer service: one Session per Decode stream, and a call for the texts of single tokens.

The event loop decodes small batches; a thread decodes large batches. When a stream ends for any reason (the gateway
disconnects, a batch is invalid, the service stops), its session is closed, which frees the state of all its requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import grpc

from rootstock_llm.protos import detokenizer_pb2 as pb
from rootstock_llm.protos import detokenizer_pb2_grpc as pb_grpc
from rootstock_llm.services.detokenizer.session import BadBatch, DetokenizerMetrics, Session, TooManyOpen
from rootstock_llm.services.detokenizer.settings import DetokenizerSettings
from rootstock_llm.services.detokenizer.text import TokenTexts
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.grpc_server import GOING_AWAY, GoingAway, MessageReader

if TYPE_CHECKING:
    from rootstock_llm.services.shared.observe.spans import Tracing

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
        """Makes every stream decode the received batches and then end with UNAVAILABLE. Gateways then use other replicas."""
        self._stopping.set()

    async def Decode(self, _: object, context: grpc.aio.ServicerContext) -> None:
        if self._stopping.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, GOING_AWAY)
        session = Session(self._tokenizer, self._settings.max_open_requests, self._metrics, self._tracing)
        reader: MessageReader[pb.DecodeBatch] = MessageReader(context, self._stopping)
        self._metrics.streams.inc()
        logger.info("stream opened", extra=fields(peer=context.peer()))
        try:
            while (batch := await reader.next()) is not None:
                await context.write(await self._decode(session, batch))
        except GoingAway:
            await context.abort(grpc.StatusCode.UNAVAILABLE, GOING_AWAY)
        except BadBatch as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TooManyOpen as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            reader.close()
            session.close()
            self._metrics.streams.dec()
            logger.info("stream closed", extra=fields(peer=context.peer()))

    async def TokenTexts(self, request: pb.TokenTextsRequest, context: grpc.aio.ServicerContext) -> pb.TokenTextsResponse:
        ids = request.token_ids
        if len(ids) > limits.MAX_TOKEN_TEXTS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"token_ids: {len(ids)} ids, at most {limits.MAX_TOKEN_TEXTS}")
        if len(ids) <= self._settings.inline_tokens:
            return pb.TokenTextsResponse(texts=map(self._texts.of, ids))
        return await asyncio.to_thread(lambda: pb.TokenTextsResponse(texts=map(self._texts.of, ids)))

    async def Info(self, request: pb.DetokenizerInfoRequest, context: grpc.aio.ServicerContext) -> pb.DetokenizerInfo:
        return pb.DetokenizerInfo(model=self._settings.model_name)

    async def _decode(self, session: Session, batch: pb.DecodeBatch) -> pb.TextBatch:
        tokens = len(batch.token_ids) + sum(len(opened.replay_ids) for opened in batch.opens)
        started = time.perf_counter()
        if tokens <= self._settings.inline_tokens:
            result = session.decode(batch)
        else:
            # If the stream is cancelled, the session must stay open until the thread has ended.
            work = asyncio.ensure_future(asyncio.to_thread(session.decode, batch))
            try:
                result = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])
                raise
        self._metrics.seconds.observe(time.perf_counter() - started)
        return result
