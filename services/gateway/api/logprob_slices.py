"""Tokens with their log probabilities, a slice at a time: rendering many of them leaves the event loop to others between two
slices, and holds only one slice as objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.logprobs import TokenLogprob, values_per_token

SLICE_VALUES = 4096  # some milliseconds of rendering
LOWEST = -9999.0  # JSON has no infinity; OpenAI's own word for "very unlikely"

Entry = tuple[int, TokenLogprob | None]  # token id, and its values; None where there is no context to predict it from
Texts = Mapping[int, bytes]


def extend(array: bytearray, values: Sequence[Any]) -> None:
    """More elements of a JSON array, whose inside `array` is."""
    if values:
        array += b"," if array else b""
        array += orjson.dumps(values)[1:-1]


class Slices:
    """chosen: the ids that were asked for by id. token_texts: None where tokens' texts are not wanted; they are then {}."""

    def __init__(self, top: int, chosen: Sequence[int], token_texts: ModelTexts | None) -> None:
        self._count = max(1, SLICE_VALUES // values_per_token(top, len(chosen)))
        self._chosen = chosen
        self._token_texts = token_texts

    async def of(self, entries: Iterable[Entry]) -> AsyncIterator[tuple[list[Entry], Texts]]:
        """Entries in order, with the texts of all tokens in them. Raises ApiError."""
        rest = iter(entries)
        while batch := list(islice(rest, self._count)):
            yield batch, await self._texts_of(batch)
            if len(batch) == self._count:
                await asyncio.sleep(0)

    async def _texts_of(self, entries: list[Entry]) -> Texts:
        if self._token_texts is None:
            return {}
        ids = set(self._chosen)
        for token, values in entries:
            ids.add(token)
            if values is not None:
                ids.update(values.top_ids)
        return await self._token_texts.of(ids)
