"""Renders the responses of OpenAI's endpoints, as server-sent events or as one JSON document.

The parts that all events of a request share are rendered once. Each event joins them with its own text.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.logprob_forms import ChatLogprobWriter, CompletionLogprobWriter
from rootstock_llm.services.gateway.generation.choice import Choice, ChoiceReader, Delta
from rootstock_llm.services.gateway.generation.errors import DONE, OPENAI, ApiError
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.generation.usage import report_of, usage_of
from rootstock_llm.services.gateway.output.output_parser import CallArguments, CallStart, Event, Reasoning, Text
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts


class _ChoicesRenderer:
    """Base class of the renderers of chats and completions. Renders the fields of a response besides its choices."""

    def __init__(self, request: RunningRequest, kind: str, id_prefix: str, created: int, model: str) -> None:
        """Renders the parts that all events share.

        Args:
            kind: Value of the response's field `object`.
            id_prefix: Text before the request id in the field `id`.
            created: Value of the field `created`, in Unix seconds.
        """
        self._request = request
        self._ids = bool(request.params.answer.return_token_ids)
        self._fields = {"id": f"{id_prefix}-{request.request_id}", "object": kind, "created": created, "model": model}
        self._head = b"data: " + orjson.dumps(self._fields)[:-1] + b',"choices":['
        self._usage = b',"usage":null' if request.params.include_usage else b""
        self._tail = b"]" + self._usage + b"}\n\n"

    async def ending(self) -> bytes:
        """Returns the last bytes of a stream: the event with the usage, if the client asks for it, and [DONE]."""
        if not self._usage:
            return DONE
        request = self._request
        report = b',"rootstock":%s' % orjson.dumps(report_of(request)) if request.wants_report else b""
        return b"".join((self._head, b'],"usage":', orjson.dumps(usage_of(request)), report, b"}\n\n", DONE))

    def failure(self, error: ApiError) -> bytes:
        return OPENAI.event_of(error, self._request.request_id)

    def _response(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the body of a response with these choices."""
        request = self._request
        report = {"rootstock": report_of(request)} if request.wants_report else {}
        return {**self._fields, "choices": choices, "usage": usage_of(request), **report}


def _ending_fields(delta: Delta, logprobs: bytes, finish_reason: str = "") -> bytes:
    """Returns the fields of a choice after its text: `logprobs`, `finish_reason` and, if the choice has ended, `stop_reason`.

    Args:
        finish_reason: The finish reason to return; "" for the finish reason in the delta's ending.
    """
    if delta.ending is None:
        return _unfinished_fields(logprobs)
    reason = orjson.dumps(delta.ending.stop_reason)
    finish = (finish_reason or delta.ending.finish_reason).encode()
    return b',"logprobs":%s,"finish_reason":"%s","stop_reason":%s' % (logprobs, finish, reason)


def _unfinished_fields(logprobs: bytes) -> bytes:
    return b',"logprobs":%s,"finish_reason":null' % logprobs


async def _logprobs_of(writer: ChatLogprobWriter | CompletionLogprobWriter | None, delta: Delta) -> bytes:
    """Returns the log probabilities of a delta as JSON. Raises ApiError."""
    return b"null" if writer is None else await writer.of(delta)


def _ids_field(name: bytes, ids: Sequence[int]) -> bytes:
    return b',"%s":%s' % (name, orjson.dumps(list(ids)))


class ChatRenderer(_ChoicesRenderer):
    def __init__(self, request: RunningRequest, created: int, model: str, token_texts: TokenTexts) -> None:
        kind = "chat.completion.chunk" if request.params.stream else "chat.completion"
        super().__init__(request, kind, "chatcmpl", created, model)
        texts, params = token_texts, request.params
        self._logprobs = ChatLogprobWriter(params, texts.of_model(request.model)) if params.wants_logprobs else None
        self._has_begun = False
        self._readers: dict[int, ChoiceReader] = {}  # by index of the choice

    def _reader_of(self, delta: Delta) -> ChoiceReader:
        index = delta.choice.index
        if index not in self._readers:
            self._readers[index] = ChoiceReader(delta.choice.params.parsing)
        return self._readers[index]

    async def chunk(self, delta: Delta) -> bytes:
        """Returns one event per parsed piece of the delta: text, reasoning or a part of a call.

        The first of these events has the log probabilities and token ids of the whole delta. If the choice has ended, the last
        event has the finish reason.
        """
        role = self._role_chunk(delta) if delta.first else b""
        if not delta.text and delta.ending is None:
            return role
        reader = self._reader_of(delta)
        deltas = [orjson.dumps(each) for each in _message_deltas(reader.read(delta))] or [b"{}"]
        if deltas == [b"{}"] and delta.ending is None and not self._ids and not delta.choice.params.wants_logprobs:
            return role
        logprobs = await _logprobs_of(self._logprobs, delta)
        ids = _ids_field(b"token_ids", delta.token_ids) if self._ids else b""
        chunks = [role]
        for number, content in enumerate(deltas):
            if number == len(deltas) - 1:
                reason = _chat_finish_reason(reader, delta) if delta.ending is not None else ""
                ending = _ending_fields(delta, logprobs, reason)
            else:
                ending = _unfinished_fields(logprobs)
            chunks.append(self._chunk(delta, content, ending + ids))
            logprobs, ids = b"null", b""
        return b"".join(chunks)

    def _chunk(self, delta: Delta, content: bytes, more: bytes) -> bytes:
        return b'%s{"index":%d,"delta":%s%s}%s' % (self._head, delta.choice.index, content, more, self._tail)

    def _role_chunk(self, delta: Delta) -> bytes:
        prompt = b""
        if self._ids and not self._has_begun:
            prompt = _ids_field(b"prompt_token_ids", self._request.prompts[0].ids)
        self._has_begun = True
        choice = (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % delta.choice.index
        )
        return b"".join((self._head, choice, b"]", prompt, self._usage, b"}\n\n"))

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        response = self._response([await self._choice(delta) for delta in deltas])
        if self._ids:
            response["prompt_token_ids"] = list(self._request.prompts[0].ids)
        return orjson.dumps(response)

    async def _choice(self, delta: Delta) -> dict[str, Any]:
        reader = self._reader_of(delta)
        message = _message_of(_message_deltas(reader.read(delta)))
        fields = _choice_fields(delta, await _logprobs_of(self._logprobs, delta), self._ids)
        fields["finish_reason"] = _chat_finish_reason(reader, delta)
        return {"index": delta.choice.index, "message": message, **fields}


def _message_deltas(events: Iterable[Event]) -> Iterable[dict[str, Any]]:
    """Yields the `delta` object of each parser event."""
    for event in events:
        if isinstance(event, Text):
            yield {"content": event.text}
        elif isinstance(event, Reasoning):
            yield {"reasoning_content": event.text, "reasoning": event.text}
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            yield _call({"index": event.index, "id": _call_id(), "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            yield _call({"index": event.index, "function": {"arguments": event.fragment}})


def _chat_finish_reason(reader: ChoiceReader, delta: Delta) -> str:
    """Returns the finish reason of a choice that has ended. "tool_calls" replaces "stop" if the choice has calls.

    The reader must have read the choice's last delta.
    """
    assert delta.ending is not None
    reason = delta.ending.finish_reason
    return "tool_calls" if reader.called and reason == "stop" else reason


def _message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that the deltas make up. A message without text has the content null if it has calls, otherwise ""."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[dict[str, Any], list[str]]] = []
    for delta in deltas:
        texts.append(delta.get("content", ""))
        thoughts.append(delta.get("reasoning_content", ""))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append((call, []))
            else:
                calls[call["index"]][1].append(call["function"]["arguments"])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else ""), "refusal": None}
    if any(thoughts):
        message["reasoning_content"] = message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_whole(call, fragments) for call, fragments in calls]
    return message


def _whole(call: dict[str, Any], fragments: list[str]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": "".join(fragments)}
    return {"id": call["id"], "type": call["type"], "function": function}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [call]}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CompletionRenderer(_ChoicesRenderer):
    def __init__(self, request: RunningRequest, created: int, model: str, token_texts: TokenTexts) -> None:
        super().__init__(request, "text_completion", "cmpl", created, model)
        shows = request.params.wants_logprobs and request.params.shows_logprobs
        texts, params = token_texts, request.params
        self._logprobs = CompletionLogprobWriter(params, texts.of_model(request.model)) if shows else None

    async def chunk(self, delta: Delta) -> bytes:
        ids = b""
        if self._ids:
            ids = _ids_field(b"token_ids", delta.token_ids)
            if delta.first:
                ids += _ids_field(b"prompt_token_ids", delta.choice.prompt.ids)
        text = orjson.dumps(delta.text)
        return b'%s{"index":%d,"text":%s%s%s}%s' % (
            self._head,
            delta.choice.index,
            text,
            _ending_fields(delta, await _logprobs_of(self._logprobs, delta)),
            ids,
            self._tail,
        )

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        shown = best_of(deltas) if self._request.params.best else deltas
        choices = [{**await self._choice(delta), "index": index} for index, delta in enumerate(shown)]
        response = self._response(choices)
        if self._ids and len(self._request.prompts) == 1:
            response["prompt_token_ids"] = list(self._request.prompts[0].ids)
        return orjson.dumps(response)

    async def _choice(self, delta: Delta) -> dict[str, Any]:
        fields = _choice_fields(delta, await _logprobs_of(self._logprobs, delta), self._ids)
        choice = {"index": delta.choice.index, "text": delta.text, **fields}
        if self._ids:
            choice["prompt_token_ids"] = list(delta.choice.prompt.ids)
        return choice


class EmbeddingRenderer:
    """Renders one embedding per input, in the order of the inputs."""

    def __init__(self, request: RunningRequest, _created: int, model: str, _token_texts: TokenTexts) -> None:
        self._request = request
        self._model = model

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        usage = usage_of(self._request)
        response = {
            "object": "list",
            "data": [{"object": "embedding", "index": d.choice.index, "embedding": self._encoded(d.choice)} for d in deltas],
            "model": self._model,
            "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]},
        }
        return orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY)

    def _encoded(self, choice: Choice) -> Any:
        vector = choice.vector()
        return base64.b64encode(vector.tobytes()).decode() if choice.params.vector_as_base64 else vector


def best_of(deltas: Sequence[Delta]) -> list[Delta]:
    """Returns for each prompt the `params.best` choices with the highest mean log probability per token, best first.

    Choices with the same mean stay in the order of their indices.
    """
    by_prompt = [list(choices) for _, choices in groupby(deltas, key=lambda delta: id(delta.choice.prompt))]
    return [
        delta
        for choices in by_prompt
        for delta in sorted(choices, key=_mean_logprob, reverse=True)[: choices[0].choice.params.best]
    ]


def _mean_logprob(delta: Delta) -> float:
    values = [row.value for row in delta.logprobs]
    return sum(values) / len(values) if values else -inf


def _choice_fields(delta: Delta, logprobs: bytes, with_ids: bool) -> dict[str, Any]:
    assert delta.ending is not None
    ids = {"token_ids": list(delta.token_ids)} if with_ids else {}
    return {
        "logprobs": orjson.Fragment(logprobs),
        "finish_reason": delta.ending.finish_reason,
        "stop_reason": delta.ending.stop_reason,
        **ids,
    }
