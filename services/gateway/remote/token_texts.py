"""Gets the texts of token ids from a detokenizer and caches them, for responses with logprobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import grpc

from rootstock_llm.protos import detokenizer_pb2, detokenizer_pb2_grpc
from rootstock_llm.services.gateway.generation.errors import unavailable
from rootstock_llm.services.gateway.generation.request import ModelInfo
from rootstock_llm.services.gateway.remote.connection import StreamBroken, response_of
from rootstock_llm.services.shared.limits import MAX_TOKEN_TEXTS
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 1 << 18  # cached ids per model, enough for a vocabulary; above it, the oldest ids are removed
CALL_S = 2.0  # time limit of a call to one detokenizer in seconds
PAUSE_S = 0.2  # seconds before the detokenizers are called again

Stubs = Callable[[str], Sequence[detokenizer_pb2_grpc.DetokenizerStub]]  # returns the stubs of a model's usable detokenizers


class TokenTexts:
    """The token texts of all models. Each process has one TokenTexts, on its event loop."""

    def __init__(self, stubs: Stubs, wait_s: float, retry_after_s: int) -> None:
        """Makes empty caches.

        Args:
            wait_s: Seconds for which a call waits for a detokenizer.
            retry_after_s: Retry-After of the error, in seconds.
        """
        self._stubs = stubs
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._models: dict[str, ModelTexts] = {}  # by model id
        self._calls = 0

    def of_model(self, model: ModelInfo) -> ModelTexts:
        """Returns the texts of a served model. If the model's tokenizer has changed, the cache is empty."""
        texts = self._models.get(model.source)
        if texts is None or texts.tokenizer != model.tokenizer:
            texts = self._models[model.source] = ModelTexts(self, model.source, model.tokenizer)
        return texts

    async def fetch(self, ids: list[int], model: str) -> list[bytes]:
        """Returns the bytes of up to MAX_TOKEN_TEXTS ids from a detokenizer of the model, in the order of the ids.

        Raises:
            ApiError: 503, no detokenizer responds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        request = detokenizer_pb2.TokenTextsRequest(token_ids=ids)
        while True:
            for stub in self._rotated(model):
                try:
                    response = await response_of(partial(stub.TokenTexts, request, timeout=CALL_S))
                except grpc.aio.AioRpcError as error:
                    logger.warning("a detokenizer did not return token texts", extra=fields(code=error.code().name))
                    continue  # tries the next detokenizer
                except StreamBroken:  # discovery has dropped the detokenizer
                    continue
                if len(response.texts) == len(ids):
                    return list(response.texts)
            if loop.time() >= deadline:
                raise unavailable("No detokenizer is available.", self._retry_after_s)
            await asyncio.sleep(PAUSE_S)

    def _rotated(self, model: str) -> list[detokenizer_pb2_grpc.DetokenizerStub]:
        stubs = list(self._stubs(model))
        self._calls += 1
        first = self._calls % len(stubs) if stubs else 0
        return stubs[first:] + stubs[:first]


class ModelTexts:
    """The token texts of one model and tokenizer, with a cache of at most MAX_REMEMBERED texts."""

    def __init__(self, texts: TokenTexts, model: str, tokenizer: str) -> None:
        self.tokenizer = tokenizer  # fingerprint of the workers' tokenizer
        self._texts = texts
        self._model = model
        self._known: dict[int, bytes] = {}  # by id, the oldest first

    async def of(self, ids: Collection[int]) -> Mapping[int, bytes]:
        """Returns the bytes of each id's text in UTF-8. They may end or begin within a character.

        Raises:
            ApiError: 503, no detokenizer responds.
        """
        known = self._known
        found = {token: known[token] for token in ids if token in known}
        missing = [token for token in dict.fromkeys(ids) if token not in found]
        for begin in range(0, len(missing), MAX_TOKEN_TEXTS):
            chunk = missing[begin : begin + MAX_TOKEN_TEXTS]
            texts = dict(zip(chunk, await self._texts.fetch(chunk, self._model), strict=True))
            self._remember(texts)
            found |= texts
        return found

    def _remember(self, texts: Mapping[int, bytes]) -> None:
        self._known |= texts
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
