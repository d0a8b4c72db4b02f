"""What a model's tokens look like, by id: asked of a detokenizer once, then remembered. For answers with log probabilities."""

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

MAX_REMEMBERED = 1 << 18  # ids of a model: a whole vocabulary; the oldest go first
CALL_S = 2.0  # that one detokenizer gets, then the next is asked
PAUSE_S = 0.2


Stubs = Callable[[str], Sequence[detokenizer_pb2_grpc.DetokenizerStub]]  # model → those of its usable detokenizers


class TokenTexts:
    """One per process, on the event loop."""

    def __init__(self, stubs: Stubs, wait_s: float, retry_after_s: int) -> None:
        self._stubs = stubs
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._known: dict[str, tuple[str, dict[int, bytes]]] = {}  # by model, with the tokenizer whose ids they are
        self._turn = 0

    def of_model(self, model: str, tokenizer: str) -> ModelTexts:
        return ModelTexts(self, model, tokenizer)

    async def of(self, ids: Collection[int], model: str = ANY, tokenizer: str = "") -> Mapping[int, bytes]:
        """Every id's bytes: UTF-8, perhaps only a part of a character's. Raises ApiError 503 when no detokenizer answers.

        `model`: a served name that the gateway knows, never one that a client made up. tokenizer: fingerprint of what its workers
        have; where that changes, what was known of the model's ids is not any more.
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
                    logger.warning("a detokenizer gave no token texts", extra=fields(code=error.code().name))
                    continue  # the next one, or this one again
                except StreamBroken:  # it is gone
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
    """Of one model, by a name that the gateway knows."""

    texts: TokenTexts
    model: str
    tokenizer: str

    async def of(self, ids: Collection[int]) -> Mapping[int, bytes]:
        """As TokenTexts.of."""
        return await self.texts.of(ids, self.model, self.tokenizer)
