"""Writes log probabilities as JSON, in the form of chats and in the form of completions, one slice of tokens at a time."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import orjson

from rootstock_llm.services.gateway.generation.choice import Choice, Delta
from rootstock_llm.services.gateway.generation.logprobs import LogprobRow, values_per_token
from rootstock_llm.services.gateway.generation.request import GenerationParams
from rootstock_llm.services.gateway.remote.token_texts import ModelTexts

SLICE_VALUES = 4096  # log probabilities per slice, which take some milliseconds to render
LOWEST = -9999.0  # JSON has no infinity; OpenAI sends this value for a very unlikely token

Entry = tuple[int, LogprobRow | None]  # token id, and log probabilities or None; a prompt's first token has none
Texts = Mapping[int, bytes]  # text of each token, by token id


def extend(array: bytearray, values: Sequence[Any]) -> None:
    """Appends values to `array`, the text of a JSON array without its brackets."""
    if values:
        array += b"," if array else b""
        array += orjson.dumps(values)[1:-1]


class LogprobSlices:
    """Cuts a sequence of tokens with log probabilities into slices.

    A slice limits the time for which other tasks of the event loop wait. It also limits memory, because only one slice at a time
    exists as Python objects.
    """

    def __init__(self, top: int, chosen: Sequence[int], token_texts: ModelTexts | None) -> None:
        """Makes the slices.

        Args:
            top: Number of most likely tokens that are listed for each token.
            chosen: Token ids whose log probability the client wants for each token.
            token_texts: Source of the tokens' texts. None if the response has no texts.
        """
        self._count = max(1, SLICE_VALUES // values_per_token(top, len(chosen)))
        self._chosen = chosen
        self._token_texts = token_texts

    async def of(self, entries: Iterable[Entry]) -> AsyncIterator[tuple[list[Entry], Texts]]:
        """Yields each slice of the entries, and the texts of the slice's tokens ({} without `token_texts`). Raises ApiError."""
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


def _slices(generation: GenerationParams, token_texts: ModelTexts) -> LogprobSlices:
    wanted = generation.sampling.logprobs
    return LogprobSlices(wanted.top, list(wanted.token_ids), token_texts)


class ChatLogprobWriter:
    """Writes the log probabilities of a chat's choices: one JSON object per token."""

    def __init__(self, generation: GenerationParams, token_texts: ModelTexts) -> None:
        self._requested = list(generation.sampling.logprobs.token_ids)
        self._slices = _slices(generation, token_texts)

    async def of(self, delta: Delta) -> bytes:
        """Returns the log probabilities of a delta as JSON. Raises ApiError."""
        content = bytearray()
        async for entries, texts in self._slices.of(_output_entries(delta)):
            extend(content, [self._entry(token, values, texts) for token, values in entries if values is not None])
        return b'{"content":[%s],"refusal":null}' % content

    def _entry(self, token: int, values: LogprobRow, texts: Texts) -> dict[str, Any]:
        tops = zip(values.top_ids, values.top_values, strict=True)
        entry = _named(token, values.value, texts)
        entry["top_logprobs"] = [_named(top, value, texts) for top, value in tops]
        if self._requested:
            chosen = zip(self._requested, values.chosen_values, strict=True)
            entry["requested_logprobs"] = [{"token_id": i, **_named(i, value, texts)} for i, value in chosen]
        return entry


def _named(token: int, value: float, texts: Texts) -> dict[str, Any]:
    text = texts[token]
    return {"token": text.decode("utf-8", "replace"), "logprob": max(value, LOWEST), "bytes": list(text)}


class CompletionLogprobWriter:
    """Writes the log probabilities of completions: parallel arrays with one element per token.

    With `echo`, the arrays begin with the prompt's tokens. The first token of the prompt has null in place of values.
    """

    def __init__(self, generation: GenerationParams, token_texts: ModelTexts) -> None:
        self._requested = list(generation.sampling.logprobs.token_ids)
        self._slices = _slices(generation, token_texts)
        self._echo = generation.wants_prompt_logprobs
        self._offsets: dict[int, TextOffsets] = {}  # by index of the choice

    async def of(self, delta: Delta) -> bytes:
        """Returns the log probabilities of a delta as JSON. Raises ApiError."""
        offsets = self._offsets.setdefault(delta.choice.index, TextOffsets(delta.choice.prompt.prefix))
        columns = _Columns(self._requested)
        async for entries, texts in self._slices.of(self._entries(delta)):
            columns.add(entries, texts, offsets)
        return columns.json()

    def _entries(self, delta: Delta) -> Iterator[Entry]:
        if self._echo and delta.first:
            yield from _prompt_entries(delta.choice)
        yield from _output_entries(delta)


class _Columns:
    """The parallel JSON arrays for the tokens of one delta."""

    def __init__(self, requested: Sequence[int]) -> None:
        self._requested = requested
        self._arrays = {name: bytearray() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        if requested:
            self._arrays["requested_logprobs"] = bytearray()

    def add(self, entries: Sequence[Entry], texts: Texts, offsets: TextOffsets) -> None:
        arrays = self._arrays
        extend(arrays["tokens"], [_name(texts[token]) for token, _ in entries])
        extend(arrays["token_logprobs"], [max(values.value, LOWEST) if values else None for _, values in entries])
        extend(arrays["top_logprobs"], [_tops(token, values, texts) if values else None for token, values in entries])
        extend(arrays["text_offset"], [offsets.step(texts[token]) for token, _ in entries])
        if self._requested:
            extend(arrays["requested_logprobs"], [self._chosen(values) if values else None for _, values in entries])

    def _chosen(self, values: LogprobRow) -> dict[str, float]:
        chosen = zip(self._requested, values.chosen_values, strict=True)
        return {str(token): max(value, LOWEST) for token, value in chosen}

    def json(self) -> bytes:
        return b"{%s}" % b",".join(b'"%s":[%s]' % (name.encode(), array) for name, array in self._arrays.items())


def _tops(token: int, values: LogprobRow, texts: Texts) -> dict[str, float]:
    """Returns the log probabilities of the most likely tokens and of the token itself, by the token's name."""
    tops = zip((*values.top_ids, token), (*values.top_values, values.value), strict=True)
    return {_name(texts[top]): max(value, LOWEST) for top, value in tops}


def _name(text: bytes) -> str:
    """Returns the text that names a token in the response.

    A token that is not valid UTF-8 gets its bytes in hex, so that names differ.
    """
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _output_entries(delta: Delta) -> Iterator[Entry]:
    return zip(delta.token_ids, delta.logprobs, strict=True)


def _prompt_entries(choice: Choice) -> Iterator[Entry]:
    was_cut_short = choice.ending is not None and choice.ending.finish_reason == "abort"
    values = choice.prompt_logprobs
    return zip(choice.prompt.ids, chain((None,), values.span(0, len(values))), strict=not was_cut_short)


class TextOffsets:
    """Computes the offset of each token of one choice in the choice's text, in characters.

    A special token that the text does not show gets the offset of the token after it.
    """

    def __init__(self, prefix: str) -> None:
        """Begins at offset 0.

        Args:
            prefix: The echoed prompt, with which the text begins, or "". step() searches the prompt's tokens in it.
        """
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0
        self._prefix = prefix.encode()
        self._at = 0  # index in the prefix, in bytes, after the last token that was found
        self._missed = 0  # total bytes of the tokens after the last token that was found

    def step(self, text: bytes) -> int:
        """Returns the offset of the next token, which has these bytes."""
        begin = self._chars
        self._chars += len(self._decoder.decode(self._shown(text) if self._at < len(self._prefix) else text))
        return begin

    def _shown(self, text: bytes) -> bytes:
        """Finds a token in the prefix. Returns the bytes from the end of the last found token to the end of this token.

        A token is also found without its leading blank. Returns b"" if the token is not found, for example because the prefix
        shows it in a normalized form. The call for the next found token then returns the bytes of both tokens.
        """
        for form in filter(None, (text, text.removeprefix(b" "))):
            found = self._prefix.find(form, self._at, self._at + 2 * self._missed + len(form))
            if found >= 0:
                end = found + len(form)
                shown, self._at, self._missed = self._prefix[self._at : end], end, 0
                return shown
        self._missed += len(text)
        return b""
