"""What tokens look like, by id: asked of a detokenizer once, then remembered. For answers with log probabilities."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

import grpc

from rootstock.v1 import detokenizer_pb2
from services.gateway.detok_link import DetokPool
from services.gateway.errors import unavailable
from services.shared.limits import MAX_TOKEN_TEXTS
from services.shared.log import fields

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 1 << 18  # ids: a whole vocabulary; the oldest go first
CALL_S = 5.0
PAUSE_S = 0.2


class TokenTexts:
    """One per process, on the event loop."""

    def __init__(self, detoks: DetokPool, wait_s: float, retry_after_s: int) -> None:
        self._detoks = detoks
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._known: dict[int, bytes] = {}

    async def of(self, ids: Collection[int]) -> Mapping[int, bytes]:
        """Every id's bytes: UTF-8, perhaps only a part of a character's. Raises ApiError 503 when no detokenizer answers."""
        found = {token: self._known[token] for token in ids if token in self._known}
        missing = [token for token in dict.fromkeys(ids) if token not in found]
        for begin in range(0, len(missing), MAX_TOKEN_TEXTS):
            chunk = missing[begin : begin + MAX_TOKEN_TEXTS]
            texts = dict(zip(chunk, await self._ask(chunk), strict=True))
            self._remember(texts)
            found |= texts
        return found

    def _remember(self, texts: Mapping[int, bytes]) -> None:
        self._known |= texts
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def _ask(self, ids: list[int]) -> list[bytes]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        request = detokenizer_pb2.TokenTextsRequest(token_ids=ids)
        while True:
            for stub in self._detoks.stubs():
                try:
                    response = await stub.TokenTexts(request, timeout=CALL_S)
                except grpc.aio.AioRpcError as error:
                    logger.warning("a detokenizer gave no token texts", extra=fields(code=error.code().name))
                    continue  # the next one, or this one again
                if len(response.texts) == len(ids):
                    return list(response.texts)
            if loop.time() >= deadline:
                raise unavailable("No detokenizer is available.", self._retry_after_s)
            await asyncio.sleep(PAUSE_S)
