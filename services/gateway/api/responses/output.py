"""Builds the output items of a response, and the stream's events about them, from parser events. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.responses.items import new_id, sealed
from rootstock_llm.services.gateway.output.output_parser import CallArguments, CallEnd, CallStart, Event, Reasoning, Text

Json = dict[str, Any]

_PART = {"message": "output_text", "reasoning": "reasoning_text"}  # type of an item's content part, by type of the item


def numbered(events: Iterable[Json], first: int) -> list[bytes]:
    """Returns the events as JSON, with ascending sequence numbers. The first event gets the number `first`."""
    return [orjson.dumps({**event, "sequence_number": number}) for number, event in enumerate(events, first)]


class OutputItems:
    """The output items of one response while it is generated.

    The methods return events, to which numbered() adds sequence numbers.
    """

    def __init__(self, owner: str, has_encrypted: bool) -> None:
        """Begins with an empty output.

        Args:
            owner: The response's id without its prefix. The ids of the items contain it.
            has_encrypted: Whether reasoning items have `encrypted_content`.
        """
        self._owner = owner
        self._has_encrypted = has_encrypted
        self._texts: list[str] = []  # pieces of the open item's text or arguments
        self._is_open = False
        self._logprobs: list[Json] = []  # log probabilities of the open item's text
        self._pending_logprobs: list[Json] = []  # log probabilities of tokens whose text is in no event yet
        self.items: list[Json] = []

    def restore(self, events: Iterable[Json]) -> None:
        """Rebuilds the items from stored events. The caller passes all pages of stored events in order."""
        for event in events:
            if event["type"] == "response.output_item.added":
                self.items.append(event["item"])
                self._texts, self._logprobs, self._is_open = [], [], True
            elif event["type"] == "response.output_item.done":
                self.items[-1] = event["item"]
                self._is_open = False
            elif event["type"].endswith(".delta"):
                self._texts.append(event["delta"])
                self._logprobs += event.get("logprobs", ())

    def logprobs(self, entries: list[Json]) -> None:
        """Takes the log probabilities of the next tokens. The next text event includes them."""
        self._pending_logprobs += entries

    def add(self, event: Event) -> Iterator[Json]:
        if isinstance(event, Text):
            yield from self._begin("message")
            entries, self._pending_logprobs = self._pending_logprobs, []
            self._logprobs += entries
            yield self._text_delta("response.output_text.delta", event.text, logprobs=entries)
        elif isinstance(event, Reasoning):
            yield from self._begin("reasoning")
            yield self._text_delta("response.reasoning_text.delta", event.text)
        elif isinstance(event, CallStart):
            yield from self._close("completed")
            yield from self._begin("function_call", event.name)
        elif isinstance(event, CallArguments):
            self._texts.append(event.fragment)
            yield self._item_event("response.function_call_arguments.delta", delta=event.fragment)
        elif isinstance(event, CallEnd):
            yield from self._close("completed", is_complete=True)

    def finish(self, status: str) -> Iterator[Json]:
        """Closes the open item with this status, and yields its last events. The item gets all pending log probabilities."""
        self._logprobs += self._pending_logprobs
        yield from self._close(status)

    def _begin(self, kind: str, name: str = "") -> Iterator[Json]:
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self._close("completed")
        item: Json = {"id": new_id(kind, self._owner, len(self.items)), "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": ""}
        self.items.append(item)
        self._texts, self._logprobs, self._is_open = [], [], True
        yield self._event("response.output_item.added", item=dict(item))
        if kind in _PART:
            yield self._item_event("response.content_part.added", content_index=0, part=self._part(""))

    def _close(self, status: str, is_complete: bool = False) -> Iterator[Json]:
        """Closes the open item.

        Args:
            is_complete: Whether the item is a call with complete arguments. A call that was cut off gets the status `incomplete`.
        """
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        kind = item["type"]
        is_cut_off = kind == "function_call" and not is_complete and status == "completed"
        item["status"] = "incomplete" if is_cut_off else status
        if kind == "function_call":
            item["arguments"] = text
            yield self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text)
            item["content"] = [part]
            more: Json = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._item_event(f"response.{_PART[kind]}.done", content_index=0, text=text, **more)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        if kind == "reasoning" and self._has_encrypted:
            item["encrypted_content"] = sealed(text)
        yield self._event("response.output_item.done", item=dict(item))

    def _part(self, text: str) -> Json:
        kind = self.items[-1]["type"]
        more: Json = {"annotations": [], "logprobs": list(self._logprobs)} if kind == "message" else {}
        return {"type": _PART[kind], "text": text, **more}

    def _text_delta(self, kind: str, text: str, **more: Any) -> Json:
        self._texts.append(text)
        return self._item_event(kind, content_index=0, delta=text, **more)

    def _item_event(self, kind: str, **more: Any) -> Json:
        return self._event(kind, item_id=self.items[-1]["id"], **more)

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": kind, "output_index": len(self.items) - 1, **more}
