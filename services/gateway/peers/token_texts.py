"""Gets the texts of token ids from a detokenizer and caches them, for responses with logprobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import grpc

from rootstock.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.gateway.peers.reconnect import StreamBroken
from services.gateway.peers.served_model import ANY
from services.gateway.peers.unary_call import answer_of
from services.gateway.request.errors import unavailable
from services.shared.limits import MAX_TOKEN_TEXTS
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 1 << 18  # cached ids per model, enough for a vocabulary; the oldest are removed first
CALL_S = 2.0  # time limit of a call to one detokenizer
PAUSE_S = 0.2  # seconds before the detokenizers are called again


Stubs = Callable[[str], Sequence[detokenizer_pb2_grpc.DetokenizerStub]]  # returns the stubs of a model's usable detokenizers


class TokenTexts:
    """The cache of token texts of all models. A process has one, on its event loop."""

    def __init__(self, stubs: Stubs, wait_s: float, retry_after_s: int) -> None:
        self._stubs = stubs
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._known: dict[str, tuple[str, dict[int, bytes]]] = {}  # by model: its tokenizer, then text by id
        self._turn = 0

    def of_model(self, model: str, tokenizer: str) -> ModelTexts:
        return ModelTexts(self, model, tokenizer)

    async def of(self, ids: Collection[int], model: str = ANY, tokenizer: str = "") -> Mapping[int, bytes]:
        """Returns the UTF-8 bytes of each id, which may be only a part of a character.

        Args:
            model: Name of a served model. Names that clients make up would fill the cache.
            tokenizer: Fingerprint of the workers' tokenizer. If it changes, the cached texts of the model are dropped.

        Raises:
            ApiError: 503, no detokenizer responds.
        """
        whose, known = self._known.get(model, (tokenizer, {}))
        if whose != tokenizer:
            known = {}
        self._known[model] = tokenizer, known
        found = {token: known[token] for token in ids if token in known}
        missing = [token for token in dict.fromkeys(ids) if token not in found]
        for begin in range(0, len(missing), MAX_TOKEN_TEXTS):
            chunk = missing[begin : begin + MAX_TOKEN_TEXTS]
            texts = dict(zip(chunk, await self._ask(chunk, model), strict=True))
            _remember(known, texts)
            found |= texts
        return found

    async def _ask(self, ids: list[int], model: str) -> list[bytes]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        request = detokenizer_pb2.TokenTextsRequest(token_ids=ids)
        while True:
            for stub in self._in_turn(model):
                try:
                    response = await answer_of(partial(stub.TokenTexts, request, timeout=CALL_S))
                except grpc.aio.AioRpcError as error:
                    logger.warning("a detokenizer did not return token texts", extra=fields(code=error.code().name))
                    continue  # with the next detokenizer, or again with this one
                except StreamBroken:  # discovery has dropped the detokenizer
                    continue
                if len(response.texts) == len(ids):
                    return list(response.texts)
            if loop.time() >= deadline:
                raise unavailable("No detokenizer is available.", self._retry_after_s)
            await asyncio.sleep(PAUSE_S)

    def _in_turn(self, model: str) -> list[detokenizer_pb2_grpc.DetokenizerStub]:
        stubs = list(self._stubs(model))
        self._turn += 1
        first = self._turn % len(stubs) if stubs else 0
        return stubs[first:] + stubs[:first]


def _remember(known: dict[int, bytes], texts: Mapping[int, bytes]) -> None:
    known |= texts
    while len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """The token texts of one served model."""

    texts: TokenTexts
    model: str
    tokenizer: str

    async def of(self, ids: Collection[int]) -> Mapping[int, bytes]:
        """Returns the bytes of each id, as TokenTexts.of() does."""
        return await self.texts.of(ids, self.model, self.tokenizer)
