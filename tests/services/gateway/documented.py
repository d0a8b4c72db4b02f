"""Compares responses with the OpenAPI document that the gateway serves: status, headers, type and body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from jsonschema import Draft202012Validator

DONE = b"[DONE]"
TRANSPORT = {"connection", "content-length", "content-type", "date", "transfer-encoding"}


@dataclass(frozen=True)
class Answered:
    """A response with the method and path of its request."""

    method: str  # HTTP method
    path: str  # URL path without query
    status: int  # status code
    headers: Mapping[str, str]  # by lower-case name
    body: bytes  # content of the response

    @classmethod
    def of(cls, answer: httpx.Response) -> Answered:
        request = answer.request
        return cls(request.method, request.url.path, answer.status_code, dict(answer.headers), answer.content)


class Documented:
    """The OpenAPI document as /openapi.json contains it, with checks of responses against it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self._validators: dict[str, Draft202012Validator] = {}

    def faults(self, answer: Answered) -> list[str]:
        """Returns a sentence for each difference from the document. Empty if the response is as documented."""
        where = f"{answer.method} {answer.path} {answer.status}"
        described = self.description(answer.method, answer.path, answer.status)
        if described is None:
            return [f"{where}: the status is not documented"]
        return [f"{where}: {fault}" for fault in (*self._headers(described, answer), *self._content(described, answer))]

    def place(self, path: str) -> str | None:
        """Returns the documented path that matches the path of a URL, or None."""
        paths = self.document["paths"]
        if path in paths:
            return path
        return next((each for each in paths if "{" in each and _pattern(each).fullmatch(path)), None)

    def description(self, method: str, path: str, status: int) -> Mapping[str, Any] | None:
        place = self.place(path)
        if place is None:
            return self._other(self.document["x-other-paths"], status, 404)
        item = self.document["paths"][place]
        if method.lower() not in item:
            refused = [each["responses"]["401"] for each in item.values() if "401" in each.get("responses", ())]
            if status == 401 and refused:  # the path has an error format of its own
                return self._resolved(refused[0])
            return self._other(item["x-other-methods"], status, 405)
        found = item[method.lower()]["responses"].get(str(status))
        return None if found is None else self._resolved(found)

    def statuses(self) -> Iterator[tuple[str, str, int]]:
        """Yields method, path and status of every documented response."""
        for path, item in self.document["paths"].items():
            for method, operation in item.items():
                if not method.startswith("x-"):
                    yield from ((method.upper(), path, int(status)) for status in operation["responses"])

    def _other(self, described: Mapping[str, Any], status: int, own: int) -> Mapping[str, Any] | None:
        """Returns the documented response to an undocumented path or method; None if the status is not documented.

        Args:
            described: The documented response with the status `own`.
            own: 404 for an unknown path, 405 for an unknown method. The HTTP connection or the check of API keys sends the other
                statuses.
        """
        responses = self.document["components"]["responses"]
        names = {400: "BadRequest", 401: "Unauthorized", 408: "RequestTimeout", 431: "HeadTooLarge", 503: "ServiceUnavailable"}
        if status == own:
            return self._resolved(described)
        found: Mapping[str, Any] | None = responses.get(names.get(status, ""))
        return found

    def _resolved(self, described: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in described:
            found: Any = self.document
            for part in described["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            described = found
        return described

    def _headers(self, described: Mapping[str, Any], answer: Answered) -> Iterator[str]:
        documented = described.get("headers", {})
        for name, header in documented.items():
            if name in answer.headers:
                value: Any = answer.headers[name]
                if header["schema"].get("type") == "integer" and value.isdigit():
                    value = int(value)
                yield from (f"{name}: {fault}" for fault in self._invalid(header["schema"], value))
            elif header.get("required"):
                yield f"{name} is missing"
        others = answer.headers.keys() - documented.keys() - TRANSPORT
        yield from (f"{name} is not documented" for name in others if not name.startswith("access-control-") and name != "vary")

    def _content(self, described: Mapping[str, Any], answer: Answered) -> Iterator[str]:
        contents = described.get("content", {})
        if answer.method == "HEAD" or not contents:
            if answer.body:
                yield f"has a body: {answer.body[:200]!r}"
            return
        media = answer.headers.get("content-type", "none").partition(";")[0]
        if media not in contents:
            yield f"{media} is not documented"
            return
        schema = contents[media]["schema"]
        if media == "text/event-stream":
            named = "named by its type" in described["description"]
            yield from (self._named_events if named else self._events)(schema, answer.body)
        elif media == "application/json":
            yield from self._json(schema, answer.body)
        else:
            yield from self._invalid(schema, answer.body.decode())

    def _events(self, schema: Mapping[str, Any], body: bytes) -> Iterator[str]:
        *events, rest = body.split(b"\n\n")
        if rest or not events or not all(event.startswith(b"data: ") for event in events):
            yield f"is no stream of events: {body[-200:]!r}"
            return
        *datas, last = (event.removeprefix(b"data: ") for event in events)
        if last != DONE and b'"error"' not in last:
            yield f"ends with neither [DONE] nor an error: {last[:200]!r}"
        for data in [*datas, *([last] if last != DONE else [])]:
            yield from self._json(schema, data)

    def _named_events(self, schema: Mapping[str, Any], body: bytes) -> Iterator[str]:
        *events, rest = body.split(b"\n\n")
        if rest or not events or not all(re.match(rb"event: [a-z_.]+\ndata: ", event) for event in events):
            yield f"is no stream of named events: {body[-200:]!r}"
            return
        for event in events:
            name, data = event.removeprefix(b"event: ").split(b"\ndata: ")
            yield from self._json(schema, data)
            if not data.startswith(b'{"type":"%s"' % name):
                yield f"is named {name!r}: {data[:200]!r}"

    def _json(self, schema: Mapping[str, Any], body: bytes) -> Iterator[str]:
        try:
            value = json.loads(body, parse_constant=_not_json)
        except ValueError as error:
            yield f"{error}: {body[:200]!r}"
            return
        yield from self._invalid(schema, value)

    def _invalid(self, schema: Mapping[str, Any], value: Any) -> Iterator[str]:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = Draft202012Validator({**schema, "components": self.document["components"]})
        for error in self._validators[key].iter_errors(value):
            yield f"{error.json_path}: {error.message[:300]}"


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _pattern(place: str) -> re.Pattern[str]:
    """Returns the pattern of a documented path. Only a model's name may contain slashes."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", lambda name: ".+" if name[1] == "model_id" else "[^/]+", re.escape(place)))
