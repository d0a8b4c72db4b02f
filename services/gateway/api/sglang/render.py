"""Renders the responses of /generate and /encode in SGLang's form.

As in SGLang, each event of a stream has the text, ids and log probabilities of the whole output so far. Each token is rendered
only once. Its bytes are stored, and later events copy them.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.logprob_forms import LOWEST, Entry, LogprobSlices, Texts, extend
from rootstock_llm.services.gateway.api.sglang.batch import Form
from rootstock_llm.services.gateway.api.sglang.sampling import LogprobSettings
from rootstock_llm.services.gateway.generation.choice import Choice, Delta, Ending
from rootstock_llm.services.gateway.generation.errors import DONE, OPENAI, ApiError
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import ModelTexts, TokenTexts

WEIGHT_VERSION = "default"
ABORT_MESSAGE = "The request was aborted."
_IDS_PER_STEP = (
    3 << 16
)  # expert ids that are encoded without a pause; a multiple of 3, so that base64 has no padding between steps


class GenerateRenderer:
    """Renders the outputs of /generate. If `token_texts` is None, entries of log probabilities have no texts."""

    def __init__(self, request: RunningRequest, many: bool, forms: Sequence[Form], token_texts: TokenTexts | None) -> None:
        self._many = many
        self._request_id = request.request_id
        texts = None if token_texts is None else token_texts.of_model(request.model)
        self._outputs = [_RenderedOutput(choice, forms[choice.index // request.params.n], texts) for choice in request.choices]

    async def chunk(self, delta: Delta) -> bytes:
        output = self._outputs[delta.choice.index]
        await output.add(delta)
        return b"data: " + await self._object(output, delta.ending, indexed=self._many) + b"\n\n"

    async def ending(self) -> bytes:
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return OPENAI.event_of(error, self._request_id)

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        objects = []
        for delta in deltas:
            output = self._outputs[delta.choice.index]
            await output.add(delta)
            objects.append(await self._object(output, delta.ending))
        return b"[" + b",".join(objects) + b"]" if self._many else objects[0]

    @staticmethod
    async def _object(output: _RenderedOutput, ending: Ending | None, indexed: bool = False) -> bytes:
        index = b',"index":%d' % output.choice.index if indexed else b""
        meta = output.meta(ending) + (b"" if ending is None else await _routed_experts(output.choice))
        return b'{"text":"%s","output_ids":[%s],"meta_info":{%s}%s}' % (output.text, output.ids, meta, index)


class _RenderedOutput:
    """The rendered bytes of one choice's output so far."""

    def __init__(self, choice: Choice, form: Form, token_texts: ModelTexts | None) -> None:
        self.choice = choice
        self.form = form
        self.text = bytearray()  # content of a JSON string, without the quotes
        self.ids = bytearray()  # content of a JSON array, without the brackets
        self._count = 0  # number of rendered output tokens
        self._has_prompt_logprobs = False
        self._input = _LogprobLists(form.logprobs, token_texts)
        self._output = _LogprobLists(form.logprobs, token_texts)

    async def add(self, delta: Delta) -> None:
        """Renders the new output of a delta. Raises ApiError."""
        if not self._has_prompt_logprobs:
            self._has_prompt_logprobs = True
            await self._input.add(self._prompt_entries())
        if self.form.without_output:
            return
        self.text += orjson.dumps(delta.text)[1:-1]
        if delta.token_ids:
            extend(self.ids, list(delta.token_ids))
            self._count += len(delta.token_ids)
        await self._output.add(zip(delta.token_ids, delta.logprobs))  # noqa: B905  # logprobs are empty if not requested

    def _prompt_entries(self) -> Iterator[Entry]:
        wanted, choice = self.form.logprobs, self.choice
        if wanted is None or wanted.start < 0:
            return iter(())
        ids = choice.prompt.ids[wanted.start :]
        # As in SGLang, the first listed token has no value. `values` begins at the token `start`, or at token 1 if `start` is 0,
        # because the first token has no log probability. An aborted request may have fewer values.
        values = choice.prompt_logprobs
        known = values.span(1 if wanted.start else 0, len(values))
        return zip(ids, chain((None,), known))  # noqa: B905

    def meta(self, ending: Ending | None) -> bytes:
        fields = orjson.dumps(_meta_of(self.choice, ending, self._count, self.form.without_output))[1:-1]
        return fields + self._input.json(b"input") + self._output.json(b"output")


class _LogprobLists:
    """SGLang's three parallel lists of log probabilities, for a prompt or for an output.

    For each token, the lists have an entry for the token itself, entries for the most likely tokens, and entries for the
    requested ids. An entry is [logprob, token id, text].
    """

    def __init__(self, wanted: LogprobSettings | None, token_texts: ModelTexts | None) -> None:
        self._wanted = wanted
        self._texts = token_texts is not None
        self._slices = LogprobSlices(wanted.top, wanted.token_ids, token_texts) if wanted else None
        self._own = bytearray()
        self._top = bytearray()
        self._chosen = bytearray()

    async def add(self, entries: Iterable[Entry]) -> None:
        """Renders the log probabilities of more tokens. Raises ApiError."""
        wanted = self._wanted
        if wanted is None or self._slices is None:
            return
        async for batch, known in self._slices.of(entries):
            texts = known if self._texts else None
            extend(self._own, [_entry(token, values.value if values else None, texts) for token, values in batch])
            if wanted.top:
                extend(self._top, [_entries(v.top_ids, v.top_values, texts) if v else None for _, v in batch])
            if wanted.token_ids:
                extend(self._chosen, [_entries(wanted.token_ids, v.chosen_values, texts) if v else None for _, v in batch])

    def json(self, side: bytes) -> bytes:
        """Returns the lists as members of a JSON object, each with a comma before it.

        Args:
            side: b"input" for the prompt's lists, b"output" for the output's lists.
        """
        wanted = self._wanted
        if wanted is None:
            return b""
        parts = [b',"%s_token_logprobs":[%s]' % (side, self._own)]
        if wanted.top:
            parts.append(b',"%s_top_logprobs":[%s]' % (side, self._top))
        if wanted.token_ids:
            parts.append(b',"%s_token_ids_logprobs":[%s]' % (side, self._chosen))
        return b"".join(parts)


async def _routed_experts(choice: Choice) -> bytes:
    """Returns the routed experts of a complete output as a member of a JSON object, with a comma before it.

    Returns b"" if the client has not requested them. Other tasks run between two steps of the encoding.
    """
    table = choice.routed_experts
    if table is None:
        return b""
    parts = []
    for begin in range(0, table.num_ids, _IDS_PER_STEP):
        parts.append(b64encode(table.client_bytes(begin, begin + _IDS_PER_STEP)))
        await asyncio.sleep(0)
    return b',"routed_experts":"%s"' % b"".join(parts)


def _entries(ids: Sequence[int], values: Sequence[float], texts: Texts | None) -> list[Any]:
    return [_entry(token, value, texts) for token, value in zip(ids, values, strict=True)]


def _entry(token: int, value: float | None, texts: Texts | None) -> list[Any]:
    text = None if texts is None else texts[token].decode("utf-8", "replace")
    return [None if value is None else max(value, LOWEST), token, text]


def _meta_of(choice: Choice, ending: Ending | None, count: int, without_output: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": choice.request_id, "finish_reason": _finish_reason(ending, without_output)}
    if ending is None:
        return meta | {
            "prompt_tokens": len(choice.prompt.ids),
            "completion_tokens": count,
            "cached_tokens": None,
            "weight_version": WEIGHT_VERSION,
        }
    return meta | {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": 0 if without_output else ending.completion_tokens,
        "cached_tokens": ending.cached_tokens,
        **({} if ending.cached_by_tier is None else {"cached_tokens_details": ending.cached_by_tier}),
        "weight_version": WEIGHT_VERSION,
        "e2e_latency": round(choice.request.clock() - choice.request.arrived, 6),
        "queue_time": ending.queue_ms / 1000,
        "num_retractions": ending.retractions,
        **_verified(ending),
    }


def _verified(ending: Ending) -> dict[str, Any]:
    rows, drafted, accepted = ending.verified_rows, ending.drafted_tokens, ending.accepted_tokens
    if not rows:
        return {}
    shares = {"spec_accept_length": round(1 + accepted / rows, 4), "spec_accept_rate": round(accepted / drafted, 4)}
    return {"spec_verify_ct": rows, "spec_draft_token_num": drafted, "spec_accept_token_num": accepted, **shares}


def _finish_reason(ending: Ending | None, without_output: bool) -> dict[str, Any] | None:
    if ending is None:
        return None
    if ending.finish_reason == "abort":
        return {"type": "abort", "message": ABORT_MESSAGE, "status_code": None, "err_type": None}
    if ending.finish_reason == "length" or without_output:
        return {"type": "length", "length": 0 if without_output else ending.completion_tokens}
    return {"type": "stop", "matched": ending.matched}


class EncodeRenderer:
    def __init__(self, many: bool) -> None:
        self._many = many

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        outputs = [self._output(delta.choice, delta.ending) for delta in deltas]
        return orjson.dumps(outputs if self._many else outputs[0], option=orjson.OPT_SERIALIZE_NUMPY)

    @staticmethod
    def _output(choice: Choice, ending: Ending | None) -> dict[str, Any]:
        meta = _meta_of(choice, ending, 0, without_output=True)
        del meta["completion_tokens"]
        return {"embedding": choice.vector(), "meta_info": meta}
