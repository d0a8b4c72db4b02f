"""Serves the Worker service: one long-lived stream per gateway, which carries the outputs of the scheduler's steps.

All calls run on the asyncio loop. When a stream ends for any reason, PeerGone is put into the inbox. The scheduler then aborts
the stream's requests and frees their memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import grpc

from rootstock_llm.protos import worker_pb2, worker_pb2_grpc
from rootstock_llm.services.shared.index.prefix_index import cache_namespace
from rootstock_llm.services.shared.limits import MAX_REQUEST_ID_CHARS, MAX_SESSION_ID_CHARS
from rootstock_llm.services.shared.observe.log_fields import fields, trace_fields
from rootstock_llm.services.shared.sampling_parameters import SamplingDefaults
from rootstock_llm.services.worker.core.contracts.messages import Prefetch, PromptKeys, Submit
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation
from rootstock_llm.services.worker.core.kv.radix_cache import tree_name
from rootstock_llm.services.worker.core.tiers.page_keys import PageKeys
from rootstock_llm.services.worker.front.outbox import (
    GatewayStream,
    LoadReport,
    ProtocolError,
    StreamOutbox,
    refusal_to_pb,
    unavailable,
)
from rootstock_llm.services.worker.front.spans import RequestSpans
from rootstock_llm.services.worker.front.wire import (
    InvalidRequest,
    ModelLimits,
    prefetch_from_pb,
    ready_from_pb,
    source_from_pb,
    submit_from_pb,
)
from rootstock_llm.services.worker.identity.model_identity import ModelIdentity
from rootstock_llm.services.worker.loop.inbox import Abort, CloseSession, Inbox, OpenSession, PeerGone, PrefetchMore, TurnedAway

logger = logging.getLogger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves the gateway streams and the calls for sessions."""

    def __init__(
        self,
        inbox: Inbox,
        outbox: StreamOutbox,
        info: worker_pb2.WorkerInfo,
        model: ModelLimits,
        on_arrival: Callable[[int, int], None],
        load: LoadReport,
        spans: RequestSpans | None = None,
        keys: PageKeys | None = None,
    ) -> None:
        """Stores the objects that the streams use.

        Args:
            inbox: messages to the scheduler's loop.
            outbox: the gateway streams.
            info: the hello, the first message on each stream.
            model: the model's limits and defaults, against which requests are checked.
            on_arrival: called with (peer, handle) of each valid request before the request is put into the inbox.
            load: load reports.
            spans: records traced requests; None without tracing.
            keys: computes page keys here, which saves time on the scheduler's thread. None if the worker has no lower tiers and
                reads no KV of other workers.
        """
        self._on_arrival = on_arrival
        self._load = load
        self._spans = spans
        self._keys = keys
        self._inbox = inbox
        self._outbox = outbox
        self._info = info
        self._model = model
        self._peers = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    def weights_replaced(self, identity: ModelIdentity, defaults: SamplingDefaults) -> None:
        """Sends a hello with the new revision to all gateways.

        Called on the scheduler's thread, before the new weights compute their first output.
        """
        self._loop.call_soon_threadsafe(self._announce, identity.revision, defaults)

    def _announce(self, revision: str, defaults: SamplingDefaults) -> None:
        """Sends the new hello on all open streams. Later streams begin with this hello."""
        info = worker_pb2.WorkerInfo()
        info.CopyFrom(self._info)
        info.revision = revision
        info.sampling_defaults.CopyFrom(worker_pb2.SamplingDefaults(**defaults.as_dict()))
        self._model = replace(self._model, defaults=defaults)
        self._info = info
        for stream in self._outbox.streams:
            stream.put_hello(info)

    async def Generate(
        self, request_iterator: AsyncIterator[worker_pb2.GenerateRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        peer = next(self._peers)
        stream = self._outbox.open(peer)
        reader = asyncio.create_task(self._read(request_iterator, peer, stream))
        next_message: asyncio.Task[worker_pb2.GenerateResponse | None] | None = None
        logger.info("gateway connected", extra=fields(peer=peer, address=context.peer()))
        try:
            yield worker_pb2.GenerateResponse(hello=self._info)
            self._load.send_first(stream)
            while not reader.done():
                next_message = asyncio.create_task(stream.take())
                await asyncio.wait((next_message, reader), return_when=asyncio.FIRST_COMPLETED)
                if not next_message.done():
                    break
                message = next_message.result()
                if message is None:
                    return
                yield message
            await reader
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.cancel()
            if next_message is not None:
                next_message.cancel()
            self._outbox.close(peer)
            self._inbox.put(PeerGone(peer))
            self._load.changed()
            logger.info("gateway disconnected", extra=fields(peer=peer))

    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.OpenSessionResponse:
        if len(request.session_id) > MAX_SESSION_ID_CHARS:
            return worker_pb2.OpenSessionResponse(message=f"session_id: longer than {MAX_SESSION_ID_CHARS} characters")
        if self._outbox.closed:
            return worker_pb2.OpenSessionResponse(message=self._outbox.closed)
        refusal: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._inbox.put(OpenSession(request.session_id, request.capacity_tokens, request.ttl_ms / 1000.0, refusal))
        message = await asyncio.wrap_future(refusal)
        return worker_pb2.OpenSessionResponse(opened=not message, message=message)

    async def CloseSession(
        self, request: worker_pb2.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CloseSessionResponse:
        closed: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._inbox.put(CloseSession(request.session_id, closed))
        was_open = await asyncio.wrap_future(closed)
        return worker_pb2.CloseSessionResponse(closed=was_open)

    async def _read(self, requests: AsyncIterator[worker_pb2.GenerateRequest], peer: int, stream: GatewayStream) -> None:
        async for request in requests:
            self._put_prefetches(request, peer)
            for submit in request.submits:
                self._submit(submit, peer, stream)
            for handle in request.aborts:
                self._inbox.put(Abort(peer, handle))
            self._load.changed()

    def _put_prefetches(self, request: worker_pb2.GenerateRequest, peer: int) -> None:
        """Passes a message's prefetch hints to the scheduler. Drops the first invalid hint and all hints after it."""
        try:
            for message in request.prefetches:
                prefetch = prefetch_from_pb(message, peer, self._model)
                self._inbox.put(replace(prefetch, page_keys=self._page_keys(prefetch)))
            for ready in request.ready:
                self._inbox.put(PrefetchMore(peer, ready_from_pb(ready)))
        except InvalidRequest as error:
            logger.info("invalid prefetch hint dropped: %s", error, extra=fields(peer=peer))

    def _submit(self, message: worker_pb2.Submit, peer: int, stream: GatewayStream) -> None:
        stream.opened(message.handle)
        logger.debug("submitted", extra=fields(**_request_fields(message), prompt_tokens=len(message.prompt_ids)))
        if self._outbox.closed:
            self._refuse(peer, stream, message, unavailable(message.handle, self._outbox.closed))
            return
        try:
            submit = submit_from_pb(message, peer, self._model, secrets.randbits(64), self._new_reservation(message))
        except InvalidRequest as error:
            logger.info("refused: %s", error, extra=fields(**_request_fields(message)))
            self._refuse(peer, stream, message, refusal_to_pb(message, error))
            return
        self._on_arrival(peer, message.handle)
        if self._spans is not None:
            resumed = len(message.output_ids)
            self._spans.arrived(peer, message.handle, message.request_id, message.traceparent, resumed)
        self._inbox.put(self._with_keys(submit))

    def _refuse(self, peer: int, stream: GatewayStream, message: worker_pb2.Submit, finish: worker_pb2.Finish) -> None:
        """Refuses a request before the core gets it.

        TurnedAway makes the core release the request's prefetched pages and its KV source.
        """
        stream.open.discard(message.handle)
        stream.put(worker_pb2.StepOutput(finishes=[finish]))
        try:
            source = source_from_pb(message)
        except InvalidRequest:
            source = None  # the core cannot release an invalid KV source
        self._inbox.put(TurnedAway(peer, message.handle, source))

    def _new_reservation(self, message: worker_pb2.Submit) -> KvReservation | None:
        if not message.hand_over or not self._info.kv_port:
            return None
        return KvReservation(secrets.randbits(63), self._info.generation, secrets.token_bytes(RESERVATION_SECRET_BYTES))

    def _with_keys(self, submit: Submit) -> Submit:
        """Adds page keys to a submit. A session turn gets no keys here, because only the core has its complete prompt."""
        return submit if submit.session is not None else replace(submit, page_keys=self._page_keys(submit))

    def _page_keys(self, prompt: Submit | Prefetch) -> PromptKeys | None:
        if self._keys is None:
            return None
        tree = tree_name(self._info.revision, cache_namespace(prompt.lora, prompt.salt))
        keys = self._keys.after(self._keys.root(tree), prompt.prompt_ids.tobytes())
        return PromptKeys(tree, tuple(keys))


def _request_fields(message: worker_pb2.Submit) -> dict[str, str]:
    """Returns log fields that identify a request."""
    return {"request_id": message.request_id[:MAX_REQUEST_ID_CHARS], **trace_fields(message.traceparent)}
