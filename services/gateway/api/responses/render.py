"""Renders a response as one JSON document, or as the events of a stream.

The response is stored before its last event is sent, because this event has the field `store`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.logprob_forms import ChatLogprobWriter
from rootstock_llm.services.gateway.api.responses.output import OutputItems
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.generation.choice import ChoiceReader, Delta
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.generation.usage import usage_of
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.service.sink import HeaderRenderer

Json = dict[str, Any]
# Stores a response unless the client turned this off; returns whether it is stored.
StoreResponse = Callable[[Json], Awaitable[bool]]

_STATUS = {"length": "incomplete", "abort": "cancelled"}  # status of the response by finish reason; else `completed`
_ERROR_CODES = {429: "rate_limit_exceeded"}


class Draft:
    """Builds a response while it is generated. The attribute `response` is complete after finish()."""

    def __init__(self, request: RunningRequest, token_texts: TokenTexts, response: Json, output: OutputItems) -> None:
        self._request = request
        self._output = output
        params = request.params
        # With a parser, some tokens are not part of the text, so their log probabilities could not be attributed.
        has_logprobs = params.wants_logprobs and params.parsing is None
        self._logprobs = ChatLogprobWriter(params, token_texts.of_model(request.model)) if has_logprobs else None
        self._reader = ChoiceReader(params.parsing)
        self.response = response

    def restore(self, events: Iterable[Json], texts: Iterable[str]) -> None:
        """Rebuilds the response from a page of stored events, and from the output texts that the parser must read again."""
        self._output.restore(events)
        self._reader.replay(texts)

    async def events_of(self, delta: Delta) -> list[Json]:
        """Returns the events of a delta. Raises ApiError."""
        if self._logprobs is not None:
            self._output.logprobs(orjson.loads(await self._logprobs.of(delta))["content"])
        events = [each for event in self._reader.read(delta) for each in self._output.add(event)]
        if delta.ending is not None:
            status = _STATUS.get(delta.ending.finish_reason, "completed")
            events += self._output.finish("completed" if status == "completed" else "incomplete")
            self.response["status"] = status
        return events

    def finish(self, completed_at: int) -> None:
        """Completes the response after the last delta. `completed_at` is in Unix seconds."""
        response = self.response
        response["output"] = self._output.items
        response["usage"] = _usage(self._request)
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif response["status"] == "completed":
            response["completed_at"] = completed_at

    def failed(self, error: ApiError) -> Json:
        """Returns the response with status failed and the output so far."""
        return {**self.response, **failure(error), "output": self._output.items}


STORED = b"x-rootstock-stored"  # header of a response that is not stored although the client requested it


class ResponseRenderer(HeaderRenderer):
    """Renders one response, and stores it before its last event."""

    def __init__(
        self,
        request: RunningRequest,
        created: int,
        model: str,
        token_texts: TokenTexts,
        response_id: str,
        parsed: ResponsesRequest,
        store: StoreResponse,
        has_store: bool,
    ) -> None:
        """Makes the renderer.

        Args:
            parsed: The parsed body.
            store: Stores the response.
            has_store: Whether this server can store responses.
        """
        self._request = request
        self._store = store
        self._response = new_response(response_id, created, model, parsed)
        self._wants_storage = self._response["store"]
        self._is_stored = has_store
        self._draft = Draft(request, token_texts, self._response, output_items(response_id, parsed))
        self._opening = b""  # the stream's first events while chunk() has not returned them
        self._sequence = 0  # number of rendered events

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """`x-rootstock-stored: false` if the client asked for a stored response, but the response is not stored."""
        return [(STORED, b"false")] if self._wants_storage and not self._is_stored else ()

    async def chunk(self, delta: Delta) -> bytes:
        if delta.first:  # rendered first, because events_of() may already set the final status
            self._opening = self._first_events()
        content = self._written(await self._draft.events_of(delta))
        opening, self._opening = self._opening, b""
        return opening + content

    async def ending(self) -> bytes:
        await self._finish()
        return self._written([{"type": final_event_type(self._response), "response": self._response}])

    def failure(self, error: ApiError) -> bytes:
        """Returns the event of the error, after the first events of the stream if chunk() has not returned them."""
        if not self._sequence:
            self._opening = self._first_events()
        response = {**self._draft.failed(error), "store": False}
        return self._opening + self._written([{"type": "response.failed", "response": response}])

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            await self._draft.events_of(delta)
        await self._finish()
        return orjson.dumps(self._response)

    async def _finish(self) -> None:
        """Completes the response, stores it, and sets its field `store` to the result."""
        response = self._response
        self._draft.finish(response["created_at"] + int(self._request.clock() - self._request.arrived))
        self._is_stored = await self._store(response)
        response["store"] = self._is_stored and self._wants_storage

    def _first_events(self) -> bytes:
        kinds = ("created", "in_progress")
        return self._written({"type": f"response.{kind}", "response": self._response} for kind in kinds)

    def _written(self, events: Iterable[Json]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: Json) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps({**event, "sequence_number": number}))


def output_items(response_id: str, parsed: ResponsesRequest) -> OutputItems:
    return OutputItems(response_id.partition("_")[2], "reasoning.encrypted_content" in (parsed.include or ()))


def failure(error: ApiError) -> Json:
    """Returns the response's fields that change if it fails with this error."""
    code = _ERROR_CODES.get(error.status, "invalid_prompt" if error.status < 500 else "server_error")
    return {"status": "failed", "error": {"code": code, "message": error.message}}


def final_event_type(response: Json) -> str:
    """Returns the type of the stream's last event for a response that has ended."""
    return {"completed": "response.completed", "failed": "response.failed"}.get(response["status"], "response.incomplete")


def new_response(response_id: str, created: int, model: str, parsed: ResponsesRequest) -> Json:
    """Returns a response without output, with status `in_progress` and the parameters of its request."""
    conversation = parsed.conversation if isinstance(parsed.conversation, str | None) else parsed.conversation.id
    text, reasoning = parsed.text, parsed.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(parsed.background),
        "conversation": None if conversation is None else {"id": conversation},
        "error": None,
        "incomplete_details": None,
        "instructions": parsed.instructions,
        "max_output_tokens": parsed.max_output_tokens,
        "max_tool_calls": parsed.max_tool_calls,
        "metadata": parsed.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": parsed.parallel_tool_calls is not False,
        "previous_response_id": parsed.previous_response_id,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": parsed.store is not False,
        "temperature": parsed.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}, "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": parsed.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in parsed.tools or ()],
        "top_logprobs": parsed.top_logprobs or 0,
        "top_p": parsed.top_p,
        "truncation": parsed.truncation or "disabled",
        "usage": None,
    }


def _usage(request: RunningRequest) -> Json:
    usage = usage_of(request)
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": usage["total_tokens"],
    }
