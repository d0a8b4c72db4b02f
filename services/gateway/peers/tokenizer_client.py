"""Requests to the tokenizer replicas: in turn over the connected ones, retried elsewhere while the deadline allows. While none is
connected they wait, and that deadline with them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from rootstock.v1 import tokenizer_pb2
from services.gateway.discovery.endpoints import Endpoints
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers import served_model
from services.gateway.peers.encode_stream import EncodeFailed
from services.gateway.peers.replicas import Replicas
from services.gateway.peers.tokenizer_replica import Replica
from services.gateway.request.errors import MAX_DETAIL_CHARS, ApiError, bad_request, internal, timed_out, unavailable
from services.gateway.request.trace import EncodeCall
from services.shared.observe.log_fields import fields
from services.shared.observe.tracing import trace_fields
from services.shared.output_formats import OutputFormats
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
# Parts of the deadline that the first attempts get while there is another replica to try; the last one gets the rest.
ATTEMPT_SHARES = (0.2, 0.3)
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE)
_MESSAGE = re.compile(r"messages\[\d+\][\w.\[\]]*(?=: )")
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class TokenizerClient:
    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        wait_s: float,
        unreachable_s: float,
        retry_after_s: int,
        metrics: GatewayMetrics,
        changed: Callable[[], None],
        dialer: Dialer = IN_THE_CLEAR,
    ) -> None:
        """`addresses` until set_endpoints() is called. timeout_s: of a call while replicas are there. wait_s: for one, in all.
        unreachable_s: as Patience.unreachable. `changed` is called when connected() may have changed."""
        self._replicas = Replicas(lambda address: Replica(address, unreachable_s, self._note, dialer))
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._retries = metrics.retries.labels("tokenizer")
        self._changed = changed
        self._turn = 0
        self._noted = asyncio.Event()
        metrics.watch_connected("tokenizer", self.connected)
        self.set_endpoints(dict.fromkeys(addresses, True))

    def connected(self, model: str = served_model.ANY) -> int:
        """Tokenizers that a call could go to."""
        return len(self._usable(model))

    async def ready(self, model: str = served_model.ANY) -> None:
        """Once a call could go somewhere, and what its tokenizers say of the model is known. Raises ApiError."""
        await self._some(model, self._wait_s)
        if not self._usable(model):
            raise self._none()

    def formats(self, model: str = served_model.ANY) -> OutputFormats:
        """How the model writes calls and reasoning, as its tokenizers say."""
        return next((one.formats for one in self._usable(model)), OutputFormats())

    def reasoning_marks(self, model: str = served_model.ANY) -> tuple[int, ...]:
        """Ids of the opening and the closing mark; empty where they are not known."""
        return next((one.reasoning_marks for one in self._usable(model)), ())

    def _usable(self, model: str) -> list[Replica]:
        return [one for one in self._replicas.by_address.values() if one.connected and one.serves(model)]

    def set_endpoints(self, endpoints: Endpoints) -> None:
        """New ones are connected to. Those that are gone finish their calls."""
        self._replicas.set_endpoints(endpoints)
        self._note()

    def _note(self) -> None:
        """Those that are usable may be others now."""
        self._noted.set()
        self._changed()

    async def run(self) -> None:
        """Keeps the replicas up until cancelled. Once."""
        await self._replicas.run()

    async def encode(
        self, request: tokenizer_pb2.EncodeRequest, param: str = "prompt", model: str = served_model.ANY
    ) -> tokenizer_pb2.EncodeResponse:
        """`param` is the client's name for the texts. Raises ApiError."""
        return await self._call(request, param, model)

    async def encode_chat(
        self, request: tokenizer_pb2.EncodeChatRequest, model: str = served_model.ANY
    ) -> tokenizer_pb2.EncodeResponse:
        """Raises ApiError."""
        return await self._call(request, "messages", model)

    async def _call(self, request: EncodeCall, param: str, model: str) -> tokenizer_pb2.EncodeResponse:
        clock = asyncio.get_running_loop().time
        left, patience = self._timeout_s, self._wait_s
        attempt, pause = 0, 0.0
        silent: set[Replica] = set()  # that this call has found so
        while left > 0 and patience >= 0:
            begun = clock()
            replica = self._next(model, silent)
            if replica is None:
                await self._some(model, patience)
                patience -= clock() - begun
                continue
            limit = self._limit_s(attempt, left, model, silent | {replica})
            attempt += 1
            if attempt > 1:
                self._retries.inc()
            try:
                return await self._attempt(request, replica, limit, alone=attempt > 1)
            except EncodeFailed as error:
                unanswered = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
                if not unanswered and error.code not in _LOST:
                    raise self._translate(error, request, param) from None
                if unanswered and limit >= left and await replica.answers():
                    raise timed_out("Tokenizing took longer than this server allows.") from None
                if unanswered:
                    silent.add(replica)
                if unanswered or error.code is grpc.StatusCode.UNAVAILABLE:
                    replica.doubt()
                gone = unanswered and limit >= left
            pause = min(max(FIRST_PAUSE_S, 2 * pause), LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            if gone:  # nobody was there in that time
                patience -= clock() - begun
            else:
                left -= clock() - begun
        raise self._none()

    def _none(self) -> ApiError:
        return unavailable("No tokenizer is available.", self._retry_after_s)

    async def _some(self, model: str, limit_s: float) -> None:
        """Returns when a call could go somewhere, or after that time."""
        with suppress(TimeoutError):  # the caller looks at the time
            async with asyncio.timeout(limit_s):
                while not self._usable(model):
                    self._noted.clear()
                    await self._noted.wait()

    async def _attempt(self, request: EncodeCall, replica: Replica, limit_s: float, alone: bool) -> tokenizer_pb2.EncodeResponse:
        replica.in_flight += 1
        try:
            return await replica.encode(request, limit_s, alone)
        finally:
            replica.in_flight -= 1
            self._replicas.retire(replica)

    def _next(self, model: str, silent: set[Replica]) -> Replica | None:
        """A connected one in turn, preferably one that is not silent; None if there is none."""
        usable = self._usable(model)
        candidates = [one for one in usable if one not in silent] or usable
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def _limit_s(self, attempt: int, left_s: float, model: str, tried: set[Replica]) -> float:
        """Of an attempt: while there is another replica to try, one that goes unanswered leaves time for it."""
        others = any(one not in tried for one in self._usable(model))
        return min(left_s, ATTEMPT_SHARES[attempt] * self._timeout_s) if others and attempt < len(ATTEMPT_SHARES) else left_s

    def _translate(self, error: EncodeFailed, request: EncodeCall, param: str) -> ApiError:
        code, details = error.code, error.details[:MAX_DETAIL_CHARS]
        if code in _REFUSED:
            return _refused(request, param, details)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            own_words = "larger than max" not in details  # else gRPC's, about its message
            message = details if details and own_words else "The request is too large to be tokenized."
            return ApiError(413, message, param=param, code="request_too_large")
        if code is grpc.StatusCode.ABORTED:
            return unavailable("The tokenizer has as much text as it can take.", self._retry_after_s)
        logger.error(
            "tokenizer failed", extra=fields(request_id=request.request_id, **trace_fields(request.traceparent), code=code.name)
        )
        return internal("The tokenizer failed.")


def _refused(request: EncodeCall, param: str, details: str) -> ApiError:
    """Returns the error that names the field at the beginning of the tokenizer's words, else `param`."""
    if isinstance(request, tokenizer_pb2.EncodeChatRequest):
        name = details.partition(":")[0]
        if name in request.read_variables:
            message = f"'{name}' is not supported by this model: its chat template does not read it. Leave it out."
            return ApiError(400, message, param=name, code="unsupported_parameter")
        found = _MESSAGE.match(details)
        param = found[0] if found else param
    return bad_request(param, details or f"'{param}' was refused by the tokenizer.")
