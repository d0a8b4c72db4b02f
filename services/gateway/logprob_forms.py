"""Log probabilities as OpenAI's two endpoints write them. One object per request; None where a request wants none."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.generation import Generation
from services.gateway.logprobs import TokenLogprob
from services.gateway.request_state import Choice, Delta
from services.gateway.token_texts import TokenTexts

LOWEST = -9999.0  # JSON has no infinity; OpenAI's own word for "very unlikely"

Entry = tuple[int, TokenLogprob | None]  # token id, and its values; None for the first token of a prompt


class _Names:
    """The texts of the tokens in what is being rendered."""

    def __init__(self, generation: Generation, token_texts: TokenTexts) -> None:
        self.wanted = generation.wants_logprobs
        self.requested = list(generation.sampling.logprobs.token_ids)
        self._source = token_texts
        self._texts: Mapping[int, bytes] = {}

    async def load(self, entries: Iterator[Entry]) -> None:
        ids = set(self.requested)
        for token, values in entries:
            ids.add(token)
            ids.update(values.top_ids if values else ())
        self._texts = await self._source.of(ids)

    def bytes_of(self, token: int) -> bytes:
        return self._texts[token]


class ChatLogprobs:
    def __init__(self, generation: Generation, token_texts: TokenTexts) -> None:
        self._names = _Names(generation, token_texts)

    async def load(self, deltas: Sequence[Delta]) -> None:
        if self._names.wanted:
            await self._names.load(entry for delta in deltas for entry in _output_entries(delta))

    def of(self, delta: Delta) -> dict[str, Any] | None:
        if not self._names.wanted:
            return None
        return {"content": [self._entry(*entry) for entry in _output_entries(delta)], "refusal": None}

    def _entry(self, token: int, values: TokenLogprob) -> dict[str, Any]:
        tops = zip(values.top_ids, values.top_values, strict=True)
        entry = self._named(token, values.value)
        entry["top_logprobs"] = [self._named(top, value) for top, value in tops]
        if self._names.requested:
            chosen = zip(self._names.requested, values.chosen_values, strict=True)
            entry["requested_logprobs"] = [{"token_id": i, **self._named(i, value)} for i, value in chosen]
        return entry

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self._names.bytes_of(token)
        return {"token": text.decode("utf-8", "replace"), "logprob": max(value, LOWEST), "bytes": list(text)}


class CompletionLogprobs:
    """With echo the prompt's tokens come first; the first of all has no value."""

    def __init__(self, generation: Generation, token_texts: TokenTexts) -> None:
        self._names = _Names(generation, token_texts)
        self._echo = generation.wants_prompt_logprobs
        self._offsets: dict[int, _Offsets] = {}  # by the choice's index

    async def load(self, deltas: Sequence[Delta]) -> None:
        if self._names.wanted:
            await self._names.load(entry for delta in deltas for entry in self._entries(delta))

    def of(self, delta: Delta) -> dict[str, Any] | None:
        if not self._names.wanted:
            return None
        entries = list(self._entries(delta))
        offsets = self._offsets.setdefault(delta.choice.index, _Offsets())
        form: dict[str, Any] = {
            "tokens": [self._name(token) for token, _ in entries],
            "token_logprobs": [max(values.value, LOWEST) if values else None for _, values in entries],
            "top_logprobs": [self._tops(token, values) if values else None for token, values in entries],
            "text_offset": [offsets.step(self._names.bytes_of(token)) for token, _ in entries],
        }
        if self._names.requested:
            form["requested_logprobs"] = [self._requested(values) if values else None for _, values in entries]
        return form

    def _entries(self, delta: Delta) -> Iterator[Entry]:
        if self._echo and delta.first:
            yield from _prompt_entries(delta.choice)
        yield from _output_entries(delta)

    def _tops(self, token: int, values: TokenLogprob) -> dict[str, float]:
        """The top ones, and the token itself where it is not among them."""
        tops = zip((*values.top_ids, token), (*values.top_values, values.value), strict=True)
        return {self._name(top): max(value, LOWEST) for top, value in tops}

    def _requested(self, values: TokenLogprob) -> dict[str, float]:
        chosen = zip(self._names.requested, values.chosen_values, strict=True)
        return {str(token): max(value, LOWEST) for token, value in chosen}

    def _name(self, token: int) -> str:
        """A token that is no whole text is written as bytes, so that two of them stay two keys."""
        text = self._names.bytes_of(token)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _output_entries(delta: Delta) -> Iterator[tuple[int, TokenLogprob]]:
    return zip(delta.token_ids, delta.logprobs, strict=True)


def _prompt_entries(choice: Choice) -> Iterator[Entry]:
    was_cut_short = choice.ending is not None and choice.ending.finish_reason == "abort"
    return zip(choice.prompt.ids, (None, *choice.prompt_logprobs), strict=not was_cut_short)


class _Offsets:
    """Where each token of one choice begins, in characters of the tokens' own texts."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def step(self, text: bytes) -> int:
        begin = self._chars
        self._chars += len(self._decoder.decode(text))
        return begin
