"""Makes the OpenAPI document of a gateway, without I/O.

The extensions `x-other-methods` and `x-other-paths` describe the responses to methods and paths that the document does not list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from rootstock_llm.services.gateway.api.document.answer import ErrorBody
from rootstock_llm.services.gateway.api.document.operation import COMMON_STATUSES, EVENTS, JSON, TEXT, ApiOperation, Content
from rootstock_llm.services.gateway.api.document.responses import headers, reference, shared
from rootstock_llm.services.shared.limits import MAX_REQUEST_ID_CHARS, MAX_ROUTING_KEY_CHARS

_SCHEMA_REF = "#/components/schemas/{model}"
_SCHEMES = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
_REQUEST_ID = {
    "name": "x-request-id",
    "in": "header",
    "description": f"Request id: 1 to {MAX_REQUEST_ID_CHARS - 8} letters, digits and ._:- characters. An invalid id is replaced.",
    "schema": {"type": "string"},
}
_ROUTING_KEY = {
    "name": "x-smg-routing-key",
    "in": "header",
    "description": "Same as routing_key in the body, which takes precedence.",
    "schema": {"type": "string", "maxLength": MAX_ROUTING_KEY_CHARS},
}
_REPORT = {
    "name": "x-rootstock-report",
    "in": "header",
    "description": "1 adds workers and waiting times to the response, in `rootstock`, if the gateway serves the playground.",
    "schema": {"type": "string"},
}

# Example values of path parameters.
_IDS = {
    "model_id": "demo",
    "response_id": f"resp_{'0' * 32}",
    "conversation_id": f"conv_{'0' * 48}",
    "item_id": f"msg_{'0' * 48}",
    "file_id": f"file-{'0' * 32}",
    "batch_id": f"batch_{'0' * 32}",
}
# Common fields of request bodies. The document lists them after the required fields and before all others.
_COMMON = (
    *("model", "messages", "input", "prompt", "text", "input_ids", "instructions", "system", "sampling_params"),
    *("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "stream", "stream_options"),
    *("temperature", "top_p", "top_k", "seed", "sampling_seed", "n", "stop", "stop_sequences"),
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "output_config", "reasoning", "reasoning_effort"),
    *("thinking", "previous_response_id", "store", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty"),
)

Schemas = Mapping[Any, Any]  # JSON schema of each body, by its Python type


def document(info: Mapping[str, str], operations: Sequence[ApiOperation], keys: bool, origins: bool) -> dict[str, Any]:
    """Returns the OpenAPI document.

    Args:
        keys: Whether the gateway checks API keys.
        origins: Whether browsers may send requests from pages of other origins (CORS).
    """
    schemas, definitions = _schemas_of(operations)
    paths: dict[str, Any] = {}
    for operation in operations:
        item = paths.setdefault(operation.path, {"x-other-methods": reference(405, operation.errors)})
        item[operation.method] = _operation(operation, schemas, keys, operation.method)
        if operation.method == "get":
            item["head"] = _operation(operation, schemas, keys, "head")
        item["options"] = _options(operation, keys, origins)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": dict(info),
        "paths": paths,
        "x-other-paths": reference(404),
        "components": {"schemas": definitions, "responses": _shared(operations, keys, schemas)},
    }
    if keys:
        found["components"]["securitySchemes"] = _SCHEMES
    return found


def _shared(operations: Sequence[ApiOperation], keys: bool, schemas: Schemas) -> dict[str, Any]:
    found = shared(keys, schemas[ErrorBody])
    for errors in {operation.errors for operation in operations if operation.errors is not None}:
        found |= shared(keys, schemas[errors.schema], errors, schemas[ErrorBody])
    return found


def _schemas_of(operations: Sequence[ApiOperation]) -> tuple[Schemas, dict[str, Any]]:
    types: list[Any] = [ErrorBody]
    for operation in operations:
        errors = operation.errors and operation.errors.schema
        types += [each for each in (operation.body, errors, *operation.referenced_types) if each is not None]
        for content in (operation.content, *operation.other_contents.values()):
            types += content.values()
    inputs = [(each, "validation", TypeAdapter(each)) for each in dict.fromkeys(types)]
    by_key, definitions = TypeAdapter.json_schemas(inputs, ref_template=_SCHEMA_REF)  # type: ignore[arg-type]
    bodies = {
        each.__name__ for operation in operations for each in (operation.body, *operation.referenced_types) if each is not None
    }
    ordered = {name: _common_first(each) if name in bodies else each for name, each in definitions["$defs"].items()}
    return {each: schema for (each, _), schema in by_key.items()}, ordered


def _common_first(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a body with its fields reordered: required fields, common fields, all others."""
    fields, required = schema.get("properties", {}), schema.get("required", ())
    first = dict.fromkeys(name for name in (*required, *_COMMON) if name in fields)
    return {**schema, "properties": {name: fields[name] for name in (*first, *(each for each in fields if each not in first))}}


def _operation(operation: ApiOperation, schemas: Schemas, keys: bool, method: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": _id_of(method, operation.path),
        "parameters": _parameters(operation),
        "responses": _responses(operation, schemas, keys),
    }
    if operation.body is not None:
        content = _content({operation.media: operation.body}, schemas)
        if operation.example is not None:
            content[operation.media]["example"] = operation.example
        found["requestBody"] = {"required": True, "content": content}
    return found | _security(operation, keys)


def _responses(operation: ApiOperation, schemas: Schemas, keys: bool) -> dict[str, Any]:
    streams = ("cache-control", "x-accel-buffering") if EVENTS in operation.content else ()
    omits = ("x-rootstock-omitted-tools",) if operation.takes_tools else ()
    description = "The result."
    if EVENTS in operation.content:
        last = "Each event is named by its type" if operation.named_events else "The last event is [DONE] or an error"
        description += f" In a stream, the schema describes the data of each event. {last}."
    errors = operation.errors
    always = errors.headers if errors is not None else ()
    described = headers(200, keys, (*always, *operation.headers), (*streams, *omits, *operation.optional_headers))
    own = {200: _response(description, operation.content, schemas, described)}
    for status, content in operation.other_contents.items():
        own[status] = _response("The gateway is not ready.", content, schemas, headers(status, keys))
    return {str(status): own.get(status) or reference(status, errors) for status in operation.all_statuses(keys)}


def _response(description: str, content: Content, schemas: Schemas, described: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": description, "headers": described}
    return {**found, "content": _content(content, schemas)} if content else found


def _content(content: Content, schemas: Schemas) -> dict[str, Any]:
    return {media: {"schema": schemas[each]} for media, each in content.items()}


def _parameters(operation: ApiOperation) -> list[dict[str, Any]]:
    found = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": description,
            "schema": {"type": "string"},
            "example": _IDS[name],
        }
        for name, description in operation.parameters.items()
    ]
    generates = [_ROUTING_KEY] if operation.generates else []
    return [*found, _REQUEST_ID, *generates, *([_REPORT] if operation.accepts_report_header else [])]


def _security(operation: ApiOperation, keys: bool) -> dict[str, Any]:
    return {"security": [{name: []} for name in _SCHEMES]} if keys and operation.requires_key else {}


def _options(operation: ApiOperation, keys: bool, origins: bool) -> dict[str, Any]:
    """Returns the description of a path's OPTIONS method.

    With `origins`, 200 and 400 also describe the plain-text responses to a browser's preflight request.
    """
    statuses = {*COMMON_STATUSES, 401, 503}.intersection(operation.all_statuses(keys)) - operation.other_contents.keys()
    responses: dict[str, Any] = {str(status): reference(status, operation.errors) for status in sorted(statuses)}
    always = ("allow", *(operation.errors.headers if operation.errors is not None else ()))
    responses["204"] = {"description": "Methods of the path.", "headers": headers(204, keys, always)}
    if origins:
        text = {TEXT: {"schema": {"type": "string"}}}
        responses["200"] = {"description": "The origin is allowed.", "content": text}
        error = {JSON: {"schema": {"$ref": _SCHEMA_REF.format(model=ErrorBody.__name__)}}}
        responses["400"] = {"description": "The origin is not allowed, or the request is invalid.", "content": {**text, **error}}
    found = {
        "tags": [operation.tag],
        "summary": "Methods of the path",
        "operationId": _id_of("options", operation.path),
        "parameters": [each for each in _parameters(operation) if each["in"] == "path"],
        "responses": responses,
    }
    return found | _security(operation, keys)


def _id_of(method: str, path: str) -> str:
    return "_".join([method, *re.findall(r"\w+", path)])
