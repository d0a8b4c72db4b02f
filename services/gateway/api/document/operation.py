"""What can be asked over HTTP: a method of a path, what it takes, and with which statuses it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
FORM, BINARY = "multipart/form-data", "application/octet-stream"
OF_ANY = (400, 408, 431, 500)  # a head that is none, is late or too large, and a fault
OF_BODIES = (413, 503)
OF_MODELS = (404, 503)

Content = Mapping[str, Any]  # type of a body, by media type; of an event's data where it is a stream; empty for no body


@dataclass(frozen=True, slots=True)
class ErrorFamily:
    """Errors of an API that writes them in its own way. name: goes before those of its answers. schema: of their bodies.
    statuses: that it has besides. headers: that its answers have besides. What a connection refuses before it has a path is
    written as everywhere."""

    name: str
    schema: type[BaseModel]
    statuses: Sequence[int]
    headers: Sequence[str]


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """body: of the request, None for none; media: its type. content: of the answer with 200. statuses: others than 200 and those
    of every operation. others: of those the ones whose body is no error. keyed: it takes an API key where there are any.
    generates: it counts against a key's limits, and has a deadline. parameters: of the path, with what they are. within: types
    that the body's schema refers to by name alone. named: its stream's events have their types as names, and the last one is no
    [DONE]. errors: where they are not as OpenAI's. headers: that its answers have. reports: it says what became of a request,
    where asked to. served: it has answers of its own, and is not refused whatever is asked. takes_tools: its body may have tools,
    of which hosted ones are left out. example: a body that any model of this kind can serve; its ids stand for real ones."""

    method: str
    path: str
    tag: str
    summary: str
    content: Content
    body: type[BaseModel] | None = None
    statuses: Sequence[int] = ()
    others: Mapping[int, Content] = field(default_factory=dict)
    keyed: bool = True
    generates: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    within: Sequence[type[BaseModel]] = ()
    named: bool = False
    errors: ErrorFamily | None = None
    headers: Sequence[str] = ()
    sometimes: Sequence[str] = ()  # headers that some of its 200 responses have
    reports: bool = False
    served: bool = True
    takes_tools: bool = False
    example: Mapping[str, Any] | None = None
    media: str = JSON

    def answers(self, keys: bool) -> list[int]:
        """Statuses of its answers. keys: whether there are API keys."""
        found = {*((200,) if self.served else ()), *OF_ANY, *self.statuses, *self.others}
        if self.body is not None:
            found.update(OF_BODIES)
        if self.generates:
            found.update((*OF_MODELS, 504))
        if self.errors is not None:
            found.update(self.errors.statuses)
        if keys and self.keyed:
            found.add(401)
            if self.body is not None and "model" in self.body.model_fields:
                found.add(403)
        if keys and self.generates:
            found.add(429)
        return sorted(found)
