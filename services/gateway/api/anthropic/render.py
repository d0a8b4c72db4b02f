"""Renders a message of Anthropic's API as one JSON document, or as the events of a stream."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import orjson
from pydantic_core import from_json

from rootstock_llm.services.gateway.api.anthropic.errors import ANTHROPIC
from rootstock_llm.services.gateway.generation.choice import ChoiceReader, Delta, Ending
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.generation.usage import usage_of
from rootstock_llm.services.gateway.output.output_parser import CallArguments, CallEnd, CallStart, Event, Reasoning, Text

Json = dict[str, Any]
_EMPTY: dict[str, Json] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}


class MessageRenderer:
    """Renders the output of one request as a message."""

    def __init__(self, request: RunningRequest, model: str, shows_thinking: bool | None, max_tokens: int) -> None:
        """Makes the renderer.

        Args:
            shows_thinking: True if thinking blocks have the reasoning, False if they are empty. None for no thinking blocks.
            max_tokens: The client's limit of output tokens.
        """
        self._request = request
        self._max_tokens = max_tokens
        self._reader = ChoiceReader(request.params.parsing)
        self._blocks = _Blocks(shows_thinking)
        self._ending: Ending | None = None
        self._message: Json = {
            "id": f"msg_{request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def chunk(self, delta: Delta) -> bytes:
        events: list[Json] = []
        if delta.first:
            counts = {"input_tokens": len(self._request.prompts[0].ids), "cache_read_input_tokens": 0, "output_tokens": 0}
            usage = {"cache_creation_input_tokens": 0, **counts}
            events.append({"type": "message_start", "message": {**self._message, "usage": usage}})
        return _server_sent([*events, *self._events_of(delta)])

    async def ending(self) -> bytes:
        delta = {name: value for name, value in self._finished().items() if name.startswith("stop_")}
        end = {"type": "message_delta", "delta": delta, "usage": _usage(self._request)}
        return _server_sent([end, {"type": "message_stop"}])

    def failure(self, error: ApiError) -> bytes:
        return ANTHROPIC.event_of(error, self._request.request_id)

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            list(self._events_of(delta))
        content = [block for block in self._blocks.blocks if block != {"type": "text", "text": ""}]
        return orjson.dumps({**self._message, "content": content, **self._finished(), "usage": _usage(self._request)})

    def _events_of(self, delta: Delta) -> Iterator[Json]:
        for event in self._reader.read(delta):
            yield from self._blocks.add(event)
        if delta.ending is not None:
            self._ending = delta.ending
            yield from self._blocks.close()

    def _finished(self) -> Json:
        ending = self._ending
        assert ending is not None
        if ending.finish_reason == "length":
            full = ending.completion_tokens < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if ending.finish_reason == "abort":  # the API has no stop reason for an aborted message
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._blocks.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(ending.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


class _Blocks:
    """Builds the content blocks of a message from parser events, and returns the stream's events about them."""

    def __init__(self, shows_thinking: bool | None) -> None:
        self._shows_thinking = shows_thinking
        self._texts: list[str] | None = None  # pieces of the open block's content, or None if no block is open
        self.blocks: list[Json] = []
        self.called = False  # whether the message has a tool_use block

    def add(self, event: Event) -> Iterator[Json]:
        if isinstance(event, Text):
            yield from self._begin("text")
            yield self._text_delta("text", event.text)
        elif isinstance(event, Reasoning):
            yield from self._think(event.text)
        elif isinstance(event, CallStart):
            self.called = True
            yield from self.close()
            yield from self._open({"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": event.name, "input": {}})
        elif isinstance(event, CallArguments):
            assert self._texts is not None
            self._texts.append(event.fragment)
            yield self._delta({"type": "input_json_delta", "partial_json": event.fragment})
        elif isinstance(event, CallEnd):
            yield from self.close(is_complete=True)

    def close(self, is_complete: bool = False) -> Iterator[Json]:
        """Closes the open content block. Has no effect if no block is open.

        Args:
            is_complete: Whether the block is a call with complete arguments. If the arguments were cut off, `input` gets only
                their complete members, because Anthropic's clients parse partial arguments in the same way.
        """
        if self._texts is None:
            return
        block, text = self.blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = orjson.Fragment(text if is_complete else json.dumps(from_json(text or "{}", allow_partial=True)))
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["thinking"] = text if self._shows_thinking else ""
            block["signature"] = blake2b(text.encode(), digest_size=24).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        self._texts = None
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _think(self, text: str) -> Iterator[Json]:
        if self._shows_thinking is None:
            return
        yield from self._begin("thinking")
        if self._shows_thinking:
            yield self._text_delta("thinking", text)
        else:
            assert self._texts is not None
            self._texts.append(text)

    def _begin(self, kind: str) -> Iterator[Json]:
        if self._texts is None or self.blocks[-1]["type"] != kind:
            yield from self.close()
            yield from self._open({"type": kind, **_EMPTY[kind]})

    def _open(self, block: Json) -> Iterator[Json]:
        self.blocks.append(block)
        self._texts = []
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _text_delta(self, kind: str, text: str) -> Json:
        assert self._texts is not None
        self._texts.append(text)
        return self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _usage(request: RunningRequest) -> Json:
    usage = usage_of(request)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _server_sent(events: Iterable[Json]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
