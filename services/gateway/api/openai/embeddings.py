"""Vectors → OpenAI's list of embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.choice import Choice, Delta
from services.gateway.request.request import RunningRequest
from services.gateway.request.usage import usage_of


class EmbeddingRenderer:
    """One document: an embedding per input, in the inputs' order."""

    def __init__(self, request: RunningRequest, _created: int, model: str, _token_texts: ModelTexts) -> None:
        self._request = request
        self._model = model

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        usage = usage_of(self._request)
        answer = {
            "object": "list",
            "data": [{"object": "embedding", "index": d.choice.index, "embedding": self._encoded(d.choice)} for d in deltas],
            "model": self._model,
            "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]},
        }
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)

    def _encoded(self, choice: Choice) -> Any:
        vector = choice.vector()
        return base64.b64encode(vector.tobytes()).decode() if choice.generation.vector_as_base64 else vector
