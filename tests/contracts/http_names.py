"""Lists the public names of the HTTP APIs: paths, fields of bodies, headers and error codes.

The names of the gateway's traffic come from its OpenAPI document. Those of the admin API come from its table of routes, the
control service's messages and example responses, because the admin API has no OpenAPI document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import grpc
from google.protobuf.descriptor import Descriptor
from pydantic import BaseModel

from rootstock_llm.protos import control_pb2, worker_pb2
from rootstock_llm.services.gateway.admin.bodies import Abort, AdminBody, GetInternalState, Load
from rootstock_llm.services.gateway.admin.operations import ROUTES, AdminOperation, AdminOperations
from rootstock_llm.services.gateway.admin.workers import KnownWorker, WorkerResult
from rootstock_llm.services.gateway.api.document.document import document
from rootstock_llm.services.gateway.api.sglang.types import NativeSampling
from rootstock_llm.services.gateway.generation.abort import AbortReport, AbortScope, PeerAnswer
from rootstock_llm.services.gateway.generation.errors import BATCH_CODES, CODES
from rootstock_llm.services.local.parameter_tables import BODIES, OPERATIONS
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.control import RANGES
from tests.contracts.schema_names import Schema, names_of

METHODS = frozenset(("delete", "get", "patch", "post", "put"))
# Type of a part of a request body → path of the part within the body.
WITHIN: Mapping[type[BaseModel], str] = {NativeSampling: "sampling_params"}
MAPS = {"tunables": tuple(RANGES), "stats": tuple(field.name for field in fields(StepStats))}  # map field → its keys


class ExampleFleet:
    """A fake fleet for the admin API, which gives example responses with all fields.

    Each operation succeeds on one worker. Another worker and another gateway are unreachable. The class replaces the worker
    directory, the workers' control services and the aborter.
    """

    def __init__(self) -> None:
        info = SimpleNamespace(role="", max_running_requests=1, context_len=1)
        link = SimpleNamespace(info=info, load=worker_pb2.WorkerLoad(), open=())
        pool = SimpleNamespace(model=SimpleNamespace(name="demo"), usable=tuple)
        connected = KnownWorker("worker-0", "10.0.0.5:7003", "10.0.0.5:9203", link=cast(Any, link), pool=cast(Any, pool))
        self._workers = [connected, KnownWorker("worker-1", "10.0.0.6:7003", "10.0.0.6:9203")]

    def find(self, _name: str | None) -> list[KnownWorker]:
        return self._workers

    async def call(self, *_arguments: object) -> list[WorkerResult]:
        connected, away = self._workers
        return [WorkerResult(connected, {}), WorkerResult(away, {}, grpc.StatusCode.UNAVAILABLE, "connection refused")]

    async def abort(self, _scope: AbortScope) -> AbortReport:
        return AbortReport(1, [PeerAnswer("10.0.0.7:9205", message="timeout")])


@cache
def openapi() -> dict[str, Any]:
    """Returns the OpenAPI document of a gateway that serves every operation and checks API keys."""
    return document({"title": "Rootstock", "version": "0"}, OPERATIONS, keys=True, origins=True)


def operations() -> Iterator[tuple[str, Schema]]:
    """Yields each operation, such as `POST /v1/completions`, with its part of the OpenAPI document."""
    for path, methods in openapi()["paths"].items():
        for method in METHODS & methods.keys():
            yield f"{method.upper()} {path}", methods[method]


def paths() -> set[str]:
    admin = {f"admin {method} {path}" for method, path in ROUTES}
    return {name for name, _ in operations()} | admin


def request_fields() -> set[str]:
    found = {f"{name} {field}" for name, operation in operations() for field in _content_names(operation.get("requestBody", {}))}
    for (method, path), route in ROUTES.items():
        schema = route.body.model_json_schema()
        found |= {f"admin {method} {path} {field}" for field in names_of(schema, schema.get("$defs", {}))}
    return found | _fields_without_effect()


def response_fields() -> set[str]:
    found: set[str] = set()
    for name, operation in operations():
        for response in operation["responses"].values():
            found |= {f"{name} {field}" for field in _content_names(response)}
    for (method, path), route in ROUTES.items():
        found |= {f"admin {method} {path} {field}" for field in _admin_response(route)}
    return found


def error_fields() -> set[str]:
    """Returns the fields of error bodies by API."""
    responses = openapi()["components"]["responses"]
    by_api: dict[str, set[str]] = {}
    for _, operation in operations():
        tag = operation["tags"][0]
        for response in operation["responses"].values():
            shared = response.get("$ref", "").rpartition("/")[2]
            by_api.setdefault(tag, set()).update(_content_names(responses[shared]) if shared else ())
    return {f"{tag} {field}" for tag, found in by_api.items() for field in found}


def _fields_without_effect() -> set[str]:
    """Returns the request fields that the gateway accepts and ignores. Most of them have only one permitted value."""
    found: set[str] = set()
    for body, known in BODIES.values():
        prefixes = [f"{each.method.upper()} {each.path} " for each in OPERATIONS if each.body is body]
        prefixes += [f"{each.method.upper()} {each.path} {WITHIN[body]}." for each in OPERATIONS if body in each.referenced_types]
        names = {*known.unused, *(name for name, neutral in known.neutral.items() if neutral)}
        found |= {f"{prefix}{name}" for prefix in prefixes for name in names}
    return found


def headers() -> set[str]:
    components = openapi()["components"]
    found = {f"request {scheme.get('name', 'authorization')}" for scheme in components["securitySchemes"].values()}
    for _, operation in operations():
        found |= {f"request {each['name']}" for each in operation["parameters"] if each["in"] == "header"}
        responses = [*operation["responses"].values(), *components["responses"].values()]
        found |= {f"response {name}" for response in responses for name in response.get("headers", {})}
    return found


def error_codes() -> set[str]:
    """Returns `CODE STATUS` for each HTTP error, and `batch CODE` for each failure of a line in a batch."""
    found = {f"{code} {status}" for code, row in CODES.items() for status in row.statuses}
    return found | {f"batch {code}" for code in BATCH_CODES}


def _content_names(body: Schema) -> set[str]:
    definitions = openapi()["components"]["schemas"]
    return {name for content in body.get("content", {}).values() for name in names_of(content["schema"], definitions)}


def _admin_response(operation: AdminOperation) -> set[str]:
    if operation.body is Abort:
        return _example_names(operation, Abort.model_validate({"rid": "a"}))
    if operation.body is Load:
        return _example_names(operation, Load.model_validate({}))
    envelope = _example_names(operation, GetInternalState.model_validate({}))
    rpc = control_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name[operation.rpc]
    return envelope | {f"workers[].result.{name}" for name in _message_names(rpc.output_type)}


def _example_names(operation: AdminOperation, body: AdminBody) -> set[str]:
    fleet: Any = ExampleFleet()
    _, content = asyncio.run(AdminOperations(fleet, fleet, fleet, timeout_s=1.0).run(operation, body))
    return set(_value_names(content, ""))


def _value_names(value: Any, path: str) -> Iterator[str]:
    for name, part in value.items() if isinstance(value, Mapping) else ():
        below = f"{path}.{name}" if path else name
        yield below
        yield from _value_names(part, below)
    for item in value if isinstance(value, list) else ():
        yield from _value_names(item, f"{path}[]")


def _message_names(message: Descriptor) -> Iterator[str]:
    """Yields the JSON paths that control_values.as_json gives to a message's fields."""
    for field in message.fields:
        yield field.name
        below = field.message_type
        if below is not None and below.GetOptions().map_entry:
            yield from (f"{field.name}.{key}" for key in MAPS[field.name])
        elif below is not None:
            yield from (f"{field.name}{'[]' if field.is_repeated else ''}.{name}" for name in _message_names(below))
