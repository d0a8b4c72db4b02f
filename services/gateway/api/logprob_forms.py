"""Log probabilities as OpenAI's two endpoints write them, as JSON. One object per request; null where a request wants none."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from services.gateway.api.logprob_slices import LOWEST, Entry, Slices, Texts, extend
from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.choice import Choice, Delta
from services.gateway.request.generation import Generation
from services.gateway.request.logprobs import TokenLogprob


def _slices(generation: Generation, token_texts: ModelTexts) -> Slices:
    wanted = generation.sampling.logprobs
    return Slices(wanted.top, list(wanted.token_ids), token_texts)


class ChatLogprobs:
    def __init__(self, generation: Generation, token_texts: ModelTexts) -> None:
        self._wanted = generation.wants_logprobs
        self._requested = list(generation.sampling.logprobs.token_ids)
        self._slices = _slices(generation, token_texts)

    async def of(self, delta: Delta) -> bytes:
        """Raises ApiError."""
        if not self._wanted:
            return b"null"
        content = bytearray()
        async for entries, texts in self._slices.of(_output_entries(delta)):
            extend(content, [self._entry(token, values, texts) for token, values in entries if values is not None])
        return b'{"content":[%s],"refusal":null}' % content

    def _entry(self, token: int, values: TokenLogprob, texts: Texts) -> dict[str, Any]:
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


class CompletionLogprobs:
    """With echo the prompt's tokens come first; the first of all has no value."""

    def __init__(self, generation: Generation, token_texts: ModelTexts) -> None:
        self._wanted = generation.wants_logprobs and generation.shows_logprobs
        self._requested = list(generation.sampling.logprobs.token_ids)
        self._slices = _slices(generation, token_texts)
        self._echo = generation.wants_prompt_logprobs
        self._offsets: dict[int, TextOffsets] = {}  # by the choice's index

    async def of(self, delta: Delta) -> bytes:
        """Raises ApiError."""
        if not self._wanted:
            return b"null"
        offsets = self._offsets.setdefault(delta.choice.index, TextOffsets(delta.choice.part.prefix))
        columns = _Columns(self._requested)
        async for entries, texts in self._slices.of(self._entries(delta)):
            columns.add(entries, texts, offsets)
        return columns.json()

    def _entries(self, delta: Delta) -> Iterator[Entry]:
        if self._echo and delta.first:
            yield from _prompt_entries(delta.choice)
        yield from _output_entries(delta)


class _Columns:
    """The parallel arrays of one piece of one choice."""

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

    def _chosen(self, values: TokenLogprob) -> dict[str, float]:
        chosen = zip(self._requested, values.chosen_values, strict=True)
        return {str(token): max(value, LOWEST) for token, value in chosen}

    def json(self) -> bytes:
        return b"{%s}" % b",".join(b'"%s":[%s]' % (name.encode(), array) for name, array in self._arrays.items())


def _tops(token: int, values: TokenLogprob, texts: Texts) -> dict[str, float]:
    """The top ones, and the token itself where it is not among them."""
    tops = zip((*values.top_ids, token), (*values.top_values, values.value), strict=True)
    return {_name(texts[top]): max(value, LOWEST) for top, value in tops}


def _name(text: bytes) -> str:
    """A token that is no whole text is written as bytes, so that two of them stay two keys."""
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
    """Where each token of one choice begins, in characters of the choice's text. prefix: what it begins with (echo), in which the
    prompt's tokens are looked for: of a special token that the text does not show, the next one begins where it does.
    """

    def __init__(self, prefix: str) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0
        self._prefix = prefix.encode()
        self._at = 0  # in its bytes
        self._missed = 0  # bytes of the tokens that were not found since the last one that was

    def step(self, text: bytes) -> int:
        begin = self._chars
        self._chars += len(self._decoder.decode(self._shown(text) if self._at < len(self._prefix) else text))
        return begin

    def _shown(self, text: bytes) -> bytes:
        """What the prefix has of the token. One that it has in another form (a blank at the start, a normalized character) counts
        with its own length once a later one is found behind it."""
        for form in filter(None, (text, text.removeprefix(b" "))):
            found = self._prefix.find(form, self._at, self._at + 2 * self._missed + len(form))
            if found >= 0:
                end = found + len(form)
                shown, self._at, self._missed = self._prefix[self._at : end], end, 0
                return shown
        self._missed += len(text)
        return b""
