"""Choices → SGLang's answers. Text, ids and log probabilities of a stream's event are those of the answer so far, as SGLang
sends them; each is rendered once and kept as bytes, so an event costs a join.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from services.gateway.embeddings import vector_of
from services.gateway.logprob_forms import LOWEST
from services.gateway.logprobs import TokenLogprob
from services.gateway.request_state import Choice, ClientRequest, Delta, Ending
from services.gateway.sglang_batch import Form
from services.gateway.sglang_sampling import LogprobWish
from services.gateway.token_texts import TokenTexts

WEIGHT_VERSION = "default"
ABORT_MESSAGE = "The request was aborted."

Entry = tuple[int, TokenLogprob | None]  # token id, and its values; None where there is no context to predict it from
Texts = Mapping[int, bytes] | None  # tokens' texts, None where they are not wanted


class GenerateRenderer:
    """token_texts: None when the tokens' texts are not wanted beside their ids."""

    def __init__(self, request: ClientRequest, many: bool, forms: Sequence[Form], token_texts: TokenTexts | None) -> None:
        self._many = many
        self._token_texts = token_texts
        self._texts: Texts = None
        self._answers = [_Answer(choice, forms[choice.index // request.generation.n]) for choice in request.choices]

    async def load(self, deltas: Sequence[Delta]) -> None:
        if self._token_texts is not None:
            ids = {token for delta in deltas for token in self._answers[delta.choice.index].tokens_in(delta)}
            self._texts = await self._token_texts.of(ids)

    def chunk(self, delta: Delta) -> bytes:
        answer = self._answers[delta.choice.index]
        answer.add(delta, self._texts)
        return b"data: " + self._object(answer, delta.ending, indexed=self._many) + b"\n\n"

    def usage_chunk(self) -> bytes:
        return b""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._answers[delta.choice.index].add(delta, self._texts)
        objects = [self._object(self._answers[delta.choice.index], delta.ending) for delta in deltas]
        return b"[" + b",".join(objects) + b"]" if self._many else objects[0]

    @staticmethod
    def _object(answer: _Answer, ending: Ending | None, indexed: bool = False) -> bytes:
        index = b',"index":%d' % answer.choice.index if indexed else b""
        return b'{"text":"%s","output_ids":[%s],"meta_info":{%s}%s}' % (answer.text, answer.ids, answer.meta(ending), index)


class _Answer:
    """One choice's answer so far, rendered."""

    def __init__(self, choice: Choice, form: Form) -> None:
        self.choice = choice
        self.form = form
        self.text = bytearray()  # the inside of a JSON string
        self.ids = bytearray()  # the inside of a JSON array
        self._count = 0
        self._began = False
        self._input = _LogprobLists(form.wish)
        self._output = _LogprobLists(form.wish)

    def add(self, delta: Delta, texts: Texts) -> None:
        if not self._began:
            self._began = True
            self._input.add(self._prompt_entries(), texts)
        if self.form.hidden:
            return
        self.text += orjson.dumps(delta.text)[1:-1]
        if delta.token_ids:
            self.ids += (b"," if self.ids else b"") + orjson.dumps(list(delta.token_ids))[1:-1]
            self._count += len(delta.token_ids)
        self._output.add(zip(delta.token_ids, delta.logprobs), texts)  # noqa: B905  # no logprobs without a wish

    def tokens_in(self, delta: Delta) -> Iterator[int]:
        """Every id whose text adding `delta` needs."""
        if self.form.wish is None:
            return
        yield from self.form.wish.token_ids
        for token, values in (
            *(() if self._began else self._prompt_entries()),
            *zip(delta.token_ids, delta.logprobs, strict=True),
        ):
            yield token
            if values is not None:
                yield from values.top_ids

    def _prompt_entries(self) -> list[Entry]:
        wish, choice = self.form.wish, self.choice
        if wish is None or wish.start < 0:
            return []
        ids = list(choice.prompt.ids[wish.start :])
        # Values begin at position `start`, or 1: nothing predicts the first token. An aborted request may have fewer.
        values = choice.prompt_logprobs[1 if wish.start else 0 :]
        return [(ids[0], None), *zip(ids[1:], values)]  # noqa: B905

    def meta(self, ending: Ending | None) -> bytes:
        fields = orjson.dumps(_meta_of(self.choice, ending, self._count, self.form.hidden))[1:-1]
        return fields + self._input.json(b"input") + self._output.json(b"output")


class _LogprobLists:
    """SGLang's three parallel lists, of a prompt or of an output: the tokens' own values, the top ones, and those of the ids that
    were asked for by id. An entry is [logprob, id, text]."""

    def __init__(self, wish: LogprobWish | None) -> None:
        self._wish = wish
        self._own = bytearray()
        self._top = bytearray()
        self._chosen = bytearray()

    def add(self, entries: Iterable[Entry], texts: Texts) -> None:
        wish = self._wish
        if wish is None:
            return
        for token, values in entries:
            _append(self._own, _entry(token, values.value if values else None, texts))
            if wish.top:
                _append(self._top, _entries(values.top_ids, values.top_values, texts) if values else None)
            if wish.token_ids:
                _append(self._chosen, _entries(wish.token_ids, values.chosen_values, texts) if values else None)

    def json(self, side: bytes) -> bytes:
        """Further members of an object, each with a comma before it."""
        wish = self._wish
        if wish is None:
            return b""
        parts = [b',"%s_token_logprobs":[%s]' % (side, self._own)]
        if wish.top:
            parts.append(b',"%s_top_logprobs":[%s]' % (side, self._top))
        if wish.token_ids:
            parts.append(b',"%s_token_ids_logprobs":[%s]' % (side, self._chosen))
        return b"".join(parts)


def _append(out: bytearray, value: list[Any] | None) -> None:
    """One more element of a JSON array."""
    if out:
        out += b","
    out += orjson.dumps(value)


def _entries(ids: Sequence[int], values: Sequence[float], texts: Texts) -> list[Any]:
    return [_entry(token, value, texts) for token, value in zip(ids, values, strict=True)]


def _entry(token: int, value: float | None, texts: Texts) -> list[Any]:
    text = None if texts is None else texts[token].decode("utf-8", "replace")
    return [None if value is None else max(value, LOWEST), token, text]


def _meta_of(choice: Choice, ending: Ending | None, count: int, hidden: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": choice.request_id, "finish_reason": _finish_reason(ending, hidden)}
    if ending is None:
        return meta | {
            "prompt_tokens": len(choice.prompt.ids),
            "completion_tokens": count,
            "cached_tokens": None,
            "weight_version": WEIGHT_VERSION,
        }
    return meta | {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": 0 if hidden else ending.completion_tokens,
        "cached_tokens": ending.cached_tokens,
        "weight_version": WEIGHT_VERSION,
        "e2e_latency": round(choice.request.clock() - choice.request.arrived, 6),
        "queue_time": ending.queue_ms / 1000,
        "num_retractions": ending.retractions,
    }


def _finish_reason(ending: Ending | None, hidden: bool) -> dict[str, Any] | None:
    if ending is None:
        return None
    if ending.finish_reason == "abort":
        return {"type": "abort", "message": ABORT_MESSAGE, "status_code": None, "err_type": None}
    if ending.finish_reason == "length" or hidden:
        return {"type": "length", "length": 0 if hidden else ending.completion_tokens}
    return {"type": "stop", "matched": ending.matched}


class EncodeRenderer:
    def __init__(self, many: bool) -> None:
        self._many = many

    async def load(self, deltas: Sequence[Delta]) -> None:
        """Vectors have no tokens with texts."""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        answers = [self._answer(delta.choice, delta.ending) for delta in deltas]
        return orjson.dumps(answers if self._many else answers[0], option=orjson.OPT_SERIALIZE_NUMPY)

    @staticmethod
    def _answer(choice: Choice, ending: Ending | None) -> dict[str, Any]:
        meta = _meta_of(choice, ending, 0, hidden=True)
        del meta["completion_tokens"]
        return {"embedding": vector_of(choice), "meta_info": meta}
