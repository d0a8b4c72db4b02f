"""Sends requests to the connected tokenizer replicas in turn.

A failed request is retried on another replica until its time limit `timeout_s`. While no replica is connected, requests wait for
up to `wait_s`, which does not count against this limit.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from rootstock_llm.protos import tokenizer_pb2
from rootstock_llm.services.gateway.discovery.endpoints import Endpoints
from rootstock_llm.services.gateway.generation.body_fields import CHAT, NO_NAMES, FieldNames
from rootstock_llm.services.gateway.generation.errors import (
    MAX_DETAIL_CHARS,
    ApiError,
    bad_request,
    internal,
    timed_out,
    unavailable,
)
from rootstock_llm.services.gateway.generation.trace import EncodeCall
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.remote.connection import ANY_MODEL
from rootstock_llm.services.gateway.remote.replicas import Replicas
from rootstock_llm.services.gateway.remote.tokenizer_replica import EncodeFailed, TokenizerReplica
from rootstock_llm.services.shared.observe.log_fields import fields, trace_fields
from rootstock_llm.services.shared.output_formats import OutputFormats
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05  # seconds between two attempts; doubles up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 0.5
# Shares of the time limit that the first and the second attempt get if another replica can be tried. Later attempts get the rest.
ATTEMPT_SHARES = (0.2, 0.3)
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE)
_MESSAGE = re.compile(r"messages(\[\d+\][\w.\[\]]*)?(?=: )")
_NO_FORMATS = OutputFormats()  # formats while no tokenizer of the model is connected
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class TokenizerClient:
    """The client of all tokenizer replicas. Belongs to the event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        wait_s: float,
        unreachable_s: float,
        retry_after_s: int,
        metrics: GatewayMetrics,
        changed: Callable[[], None],
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        """Makes the client.

        Args:
            addresses: Addresses to use until set_endpoints() is called.
            timeout_s: Time limit of a call while replicas are connected.
            wait_s: Longest time for which a call waits for a replica, in total.
            unreachable_s: See Patience.unreachable.
            retry_after_s: Retry-After of errors, in seconds.
            changed: Called when the result of connected() may have changed.
        """
        self._replicas = Replicas(lambda address: TokenizerReplica(address, unreachable_s, self._on_replicas_changed, dialer))
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._retries = metrics.retries.labels("tokenizer")
        self._changed = changed
        self._num_calls = 0
        self._replicas_changed = asyncio.Event()
        metrics.watch_connected("tokenizer", self.connected)
        self.set_endpoints(dict.fromkeys(addresses, True))

    def connected(self, model: str = ANY_MODEL) -> int:
        """Returns the number of replicas that take calls for the model."""
        return len(self._usable(model))

    async def ready(self, model: str = ANY_MODEL) -> None:
        """Waits for a replica of the model. formats() and reasoning_marks() then return its values. Raises ApiError."""
        await self._wait_usable(model, self._wait_s)
        if not self._usable(model):
            raise self._unavailable()

    def formats(self, model: str = ANY_MODEL) -> OutputFormats:
        """Returns the model's formats of tool calls and reasoning, as one of its tokenizers reports them."""
        return next((each.formats for each in self._usable(model)), _NO_FORMATS)

    def reasoning_marks(self, model: str = ANY_MODEL) -> tuple[int, ...]:
        """Returns the token ids of the opening and the closing mark of reasoning; empty if they are unknown."""
        return next((each.reasoning_marks for each in self._usable(model)), ())

    def _usable(self, model: str) -> list[TokenizerReplica]:
        return [each for each in self._replicas.by_address.values() if each.connected and each.serves(model)]

    def set_endpoints(self, endpoints: Endpoints) -> None:
        """Applies new endpoints. Replicas of removed endpoints finish their calls."""
        self._replicas.set_endpoints(endpoints)
        self._on_replicas_changed()

    def _on_replicas_changed(self) -> None:
        """Wakes waiting calls, because the set of usable replicas may have changed."""
        self._replicas_changed.set()
        self._changed()

    async def run(self) -> None:
        """Keeps the replicas connected until cancelled. May be called once."""
        await self._replicas.run()

    async def encode(
        self, request: tokenizer_pb2.EncodeRequest, param: str = "prompt", model: str = ANY_MODEL
    ) -> tokenizer_pb2.EncodeResponse:
        """Tokenizes texts. Raises an ApiError that names the field `param` of the client's request."""
        return await self._call(request, param, model)

    async def encode_chat(
        self, request: tokenizer_pb2.EncodeChatRequest, model: str = ANY_MODEL, names: FieldNames = CHAT
    ) -> tokenizer_pb2.EncodeResponse:
        """Renders and tokenizes a chat. Raises an ApiError that names the invalid field, translated by `names`."""
        return await self._call(request, names.of("messages"), model, names)

    async def _call(
        self, request: EncodeCall, param: str, model: str, names: FieldNames = NO_NAMES
    ) -> tokenizer_pb2.EncodeResponse:
        clock = asyncio.get_running_loop().time
        left, patience = self._timeout_s, self._wait_s
        attempt, pause = 0, 0.0
        silent: set[TokenizerReplica] = set()  # replicas that did not respond to an attempt within its limit
        while left > 0 and patience >= 0:
            begun = clock()
            replica = self._next(model, silent)
            if replica is None:
                await self._wait_usable(model, patience)
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
                    raise self._translate(error, request, param, names) from None
                if unanswered and limit >= left and await replica.responds():
                    raise timed_out("Tokenizing took longer than this server allows.") from None
                if unanswered:
                    silent.add(replica)
                if unanswered or error.code is grpc.StatusCode.UNAVAILABLE:
                    replica.doubt()
                gone = unanswered and limit >= left
            pause = min(max(FIRST_PAUSE_S, 2 * pause), LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            if gone:  # the replica is lost, so the time of the attempt counts as waiting for a replica
                patience -= clock() - begun
            else:
                left -= clock() - begun
        raise self._unavailable()

    def _unavailable(self) -> ApiError:
        return unavailable("No tokenizer is available.", self._retry_after_s)

    async def _wait_usable(self, model: str, limit_s: float) -> None:
        """Waits until a replica of the model is usable, or `limit_s` seconds have passed."""
        with suppress(TimeoutError):  # the caller checks the time
            async with asyncio.timeout(limit_s):
                while not self._usable(model):
                    self._replicas_changed.clear()
                    await self._replicas_changed.wait()

    async def _attempt(
        self, request: EncodeCall, replica: TokenizerReplica, limit_s: float, alone: bool
    ) -> tokenizer_pb2.EncodeResponse:
        replica.in_flight += 1
        try:
            return await replica.encode(request, limit_s, alone)
        finally:
            replica.in_flight -= 1
            self._replicas.retire(replica)

    def _next(self, model: str, silent: set[TokenizerReplica]) -> TokenizerReplica | None:
        """Returns the next usable replica, preferably a replica that is not in `silent`. None if no replica is usable."""
        usable = self._usable(model)
        candidates = [each for each in usable if each not in silent] or usable
        if not candidates:
            return None
        self._num_calls += 1
        return candidates[self._num_calls % len(candidates)]

    def _limit_s(self, attempt: int, left_s: float, model: str, tried: set[TokenizerReplica]) -> float:
        """Returns the time limit of an attempt in seconds. It leaves time for a retry if another replica can be tried.

        Args:
            attempt: Number of earlier attempts.
            left_s: Seconds left of the call's time limit.
            tried: The replica of this attempt, and the replicas that did not respond to earlier attempts.
        """
        others = any(each not in tried for each in self._usable(model))
        return min(left_s, ATTEMPT_SHARES[attempt] * self._timeout_s) if others and attempt < len(ATTEMPT_SHARES) else left_s

    def _translate(self, error: EncodeFailed, request: EncodeCall, param: str, names: FieldNames) -> ApiError:
        code, details = error.code, error.details[:MAX_DETAIL_CHARS]
        if code in _REFUSED:
            return _refused(request, param, details, names)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            own_words = "larger than max" not in details  # False if gRPC has refused the message by its size
            message = details if details and own_words else "The request is too large to be tokenized."
            return ApiError(413, message, param=param, code="request_too_large")
        if code is grpc.StatusCode.ABORTED:
            return unavailable("The tokenizer is busy with other texts.", self._retry_after_s)
        logger.error(
            "tokenizer failed", extra=fields(request_id=request.request_id, **trace_fields(request.traceparent), code=code.name)
        )
        return internal("The tokenizer failed.")


def _refused(request: EncodeCall, param: str, details: str, names: FieldNames) -> ApiError:
    """Returns the error for a refused request.

    If the tokenizer's text begins with the name of a field, the error names this field. Otherwise, it names `param`.
    """
    if isinstance(request, tokenizer_pb2.EncodeChatRequest):
        name = details.partition(":")[0]
        if name in request.read_variables:
            message = f"'{name}' is not supported by this model: its chat template does not read it. Leave it out."
            return ApiError(400, message, param=name, code="unsupported_parameter")
        if (found := _MESSAGE.match(details)) is not None:
            param = names.of(found[0])
            details = param + details[found.end() :]
    return bad_request(param, details or f"The tokenizer has refused '{param}'.")
