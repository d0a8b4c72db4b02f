"""An OTLP collector on a real port that records the received spans."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

WAIT_S = 60.0
# Ids of a client's trace, and traceparent headers with them
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{CALLER}-01"
UNSAMPLED = f"00-{TRACE}-{CALLER}-00"


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


@dataclass(frozen=True)
class Received:
    service: str  # value of service.name
    span: Span  # as received

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def attributes(self) -> dict[str, Any]:
        return {item.key: _value(item.value) for item in self.span.attributes}

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]

    def within(self, other: Received, slack_ns: int = 0) -> bool:
        begins = self.span.start_time_unix_nano >= other.span.start_time_unix_nano - slack_ns
        return begins and self.span.end_time_unix_nano <= other.span.end_time_unix_nano + slack_ns


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {item.key: _value(item.value) for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Received(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def named(self, name: str) -> list[Received]:
        """Returns the spans of this name in the order of their start."""
        found = [span for span in list(self.spans) if span.name == name]
        return sorted(found, key=lambda span: span.span.start_time_unix_nano)

    def wait_for(self, name: str, count: int = 1) -> list[Received]:
        deadline = time.monotonic() + WAIT_S
        while len(self.named(name)) < count:
            assert time.monotonic() < deadline, f"{count} of {name}: got {sorted(span.name for span in self.spans)}"
            time.sleep(0.01)
        return self.named(name)
