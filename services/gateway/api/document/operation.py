"""Describes the operations of the HTTP APIs: method and path, request body, and responses by status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
FORM, BINARY = "multipart/form-data", "application/octet-stream"
# Error statuses of every operation: an invalid, late or too large request head, and an unexpected exception.
COMMON_STATUSES = (400, 408, 431, 500)
BODY_STATUSES = (413, 503)  # error statuses of operations with a request body
GENERATION_STATUSES = (404, 503, 504)  # error statuses of operations that generate

Content = Mapping[str, Any]  # type of a body, by media type; for a stream, the type of an event's data; empty if there is no body


@dataclass(frozen=True, slots=True)
class ErrorFamily:
    """The errors of an API whose error bodies differ from OpenAI's.

    If a request fails before the gateway knows its path, the error has OpenAI's form.
    """

    name: str  # prefix of the names of these error responses in the document
    schema: type[BaseModel]  # type of the error bodies
    statuses: Sequence[int]  # the API's error statuses that OpenAI's API does not have
    headers: Sequence[str]  # the API's response headers that OpenAI's API does not have


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """A method of a path, as the OpenAPI document describes it."""

    method: str  # in lower case
    path: str
    tag: str
    summary: str
    content: Content  # body of the 200 response
    body: type[BaseModel] | None = None  # type of the request body, or None if the operation has no body
    statuses: Sequence[int] = ()  # error statuses of this operation, to which all_statuses() adds the common ones
    other_contents: Mapping[int, Content] = field(default_factory=dict)  # bodies that are not errors, by status other than 200
    requires_key: bool = True  # whether an API key is required if the gateway checks keys
    generates: bool = False  # whether requests generate tokens, count against the limits of the API key, and have a deadline
    parameters: Mapping[str, str] = field(default_factory=dict)  # descriptions of the path's parameters, by name
    referenced_types: Sequence[type[BaseModel]] = ()  # types that the body's schema mentions only by name
    named_events: bool = False  # whether a stream's events have names, and no [DONE] follows them
    errors: ErrorFamily | None = None  # form of the errors, or None for OpenAI's
    headers: Sequence[str] = ()  # headers of every 200 response
    optional_headers: Sequence[str] = ()  # headers of some 200 responses
    accepts_report_header: bool = False  # whether requests may have the header x-rootstock-report
    served: bool = True  # False if every request is refused
    takes_tools: bool = False  # whether the body may have tools, of which the gateway may omit hosted tools
    # A body that is valid for any generating or embedding model. Ids of stored objects in it do not exist.
    example: Mapping[str, Any] | None = None
    media: str = JSON  # media type of the request body

    def all_statuses(self, keys: bool) -> list[int]:
        """Returns the statuses of all responses, in ascending order.

        Args:
            keys: Whether the gateway checks API keys.
        """
        found = {*((200,) if self.served else ()), *COMMON_STATUSES, *self.statuses, *self.other_contents}
        if self.body is not None:
            found.update(BODY_STATUSES)
        if self.generates:
            found.update(GENERATION_STATUSES)
        if self.errors is not None:
            found.update(self.errors.statuses)
        if keys and self.requires_key:
            found.add(401)
            if self.body is not None and "model" in self.body.model_fields:
                found.add(403)
        if keys and self.generates:
            found.add(429)
        return sorted(found)
