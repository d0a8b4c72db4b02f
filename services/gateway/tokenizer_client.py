"""Unary calls to the tokenizer replicas: round robin over the connected ones, retried elsewhere while the deadline allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

from rootstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.gateway.errors import MAX_DETAIL_CHARS, ApiError, bad_request, internal, timed_out, unavailable
from services.gateway.metrics import GatewayMetrics
from services.shared import rpc
from services.shared.log import fields

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE)


class Replica:
    """One tokenizer address. `connected` follows the channel's state, which is kept trying."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.connected = False
        self._channel = rpc.channel(address)
        self.stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)  # type: ignore[no-untyped-call]

    async def watch(self, changed: Callable[[], None]) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            connected = state is grpc.ChannelConnectivity.READY
            if connected is not self.connected:
                self.connected = connected
                changed()
            await self._channel.wait_for_state_change(state)

    async def close(self) -> None:
        await self._channel.close()


class TokenizerClient:
    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        retry_after_s: int,
        metrics: GatewayMetrics,
        changed: Callable[[], None],
    ) -> None:
        self._replicas = [Replica(address) for address in addresses]
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s
        self._retries = metrics.retries.labels("tokenizer")
        self._changed = changed
        self._turn = 0
        metrics.watch_connected("tokenizer", self.connected)

    def connected(self) -> int:
        return sum(replica.connected for replica in self._replicas)

    async def run(self) -> None:
        """Watches the channels until cancelled, then closes them."""
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self._replicas:
                    group.create_task(replica.watch(self._changed))
        finally:
            for replica in self._replicas:
                await replica.close()

    async def encode(self, request: tokenizer_pb2.EncodeRequest, param: str = "prompt") -> tokenizer_pb2.EncodeResponse:
        """`param` is the client's name for the texts. Raises ApiError."""
        return await self._call(lambda stub, timeout: stub.Encode(request, timeout=timeout), request.request_id, param)

    async def encode_chat(self, request: tokenizer_pb2.EncodeChatRequest) -> tokenizer_pb2.EncodeResponse:
        """Raises ApiError."""
        return await self._call(lambda stub, timeout: stub.EncodeChat(request, timeout=timeout), request.request_id, "messages")

    async def _call(
        self,
        call: Callable[[tokenizer_pb2_grpc.TokenizerStub, float], Awaitable[tokenizer_pb2.EncodeResponse]],
        request_id: str,
        param: str,
    ) -> tokenizer_pb2.EncodeResponse:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        pause = 0.0
        while (left := deadline - loop.time()) > pause:
            if pause:
                self._retries.inc()
                await asyncio.sleep(pause)
                left -= pause
            try:
                return await call(self._next().stub, left)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise self._translate(error, request_id, param) from None
            pause = min(max(FIRST_PAUSE_S, 2 * pause), LONGEST_PAUSE_S)
        raise unavailable("No tokenizer is available.", self._retry_after_s)

    def _next(self) -> Replica:
        candidates = [replica for replica in self._replicas if replica.connected] or self._replicas
        if not candidates:
            raise unavailable("No tokenizer is available.", self._retry_after_s)
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def _translate(self, error: grpc.aio.AioRpcError, request_id: str, param: str) -> ApiError:
        code, details = error.code(), (error.details() or "")[:MAX_DETAIL_CHARS]
        if code in _REFUSED:
            return bad_request(param, details or f"'{param}' was refused by the tokenizer.")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            own_words = "larger than max" not in details  # else gRPC's, about its message
            message = details if details and own_words else "The request is too large to be tokenized."
            return ApiError(413, message, param=param, code="request_too_large")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return timed_out("Tokenizing took longer than this server allows.")
        logger.error("tokenizer failed", extra=fields(request_id=request_id, code=code.name))
        return internal("The tokenizer failed.")
