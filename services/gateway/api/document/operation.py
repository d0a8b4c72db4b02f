"""Describes the operations of the HTTP APIs: method and path, request body, and responses by status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
FORM, BINARY = "multipart/form-data", "application/octet-stream"
OF_ANY = (400, 408, 431, 500)  # statuses of every operation: an invalid, late or too large head, and an unexpected exception
OF_BODIES = (413, 503)  # further statuses of operations with a request body
OF_MODELS = (404, 503)  # further statuses of operations that generate

Content = Mapping[str, Any]  # type of a body by media type; for a stream, type of an event's data; empty if there is no body


@dataclass(frozen=True, slots=True)
class ErrorFamily:
    """The errors of an API whose error bodies differ from OpenAI's.

    Errors that a connection sends before it knows the path have OpenAI's form in all APIs.
    """

    name: str  # prefix of the names of its responses in the document
    schema: type[BaseModel]  # type of the error bodies
    statuses: Sequence[int]  # statuses that OpenAI's errors do not have
    headers: Sequence[str]  # headers that OpenAI's responses do not have


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """A method of a path, as the OpenAPI document describes it."""

    method: str  # in lower case
    path: str
    tag: str
    summary: str
    content: Content  # body of the 200 response
    body: type[BaseModel] | None = None  # type of the request body, or None if there is none
    statuses: Sequence[int] = ()  # statuses besides 200 and the common ones
    others: Mapping[int, Content] = field(default_factory=dict)  # further statuses whose body is not an error
    keyed: bool = True  # an API key is required if the gateway checks keys
    generates: bool = False  # counts against the limits of the API key, and has a deadline
    parameters: Mapping[str, str] = field(default_factory=dict)  # descriptions of the path's parameters, by name
    within: Sequence[type[BaseModel]] = ()  # types that the body's schema refers to only by their names
    named: bool = False  # events of its stream are named by their types, and no [DONE] follows them
    errors: ErrorFamily | None = None  # the API's own form of errors, or None for OpenAI's
    headers: Sequence[str] = ()  # headers of every 200 response
    sometimes: Sequence[str] = ()  # headers of some 200 responses
    reports: bool = False  # accepts the header x-rootstock-report
    served: bool = True  # False if every request is refused
    takes_tools: bool = False  # the body may name tools; hosted tools may be left out
    example: Mapping[str, Any] | None = None  # a valid body for any model of this kind; stored objects that it names do not exist
    media: str = JSON  # media type of the request body

    def answers(self, keys: bool) -> list[int]:
        """Returns the statuses of all responses. `keys` is True if the gateway checks API keys."""
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
