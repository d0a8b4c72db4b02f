"""Spans of one call that belongs to a traced request. None stands for one that is not traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from services.shared.observe.spans import Span, Tracing

_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def begin_call(tracing: Tracing, rpc: str, request_id: str, traceparent: str) -> Span | None:
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": "rootstock.v1.Tokenizer",
        "rpc.method": rpc,
        "rootstock.request_id": request_id,
    }
    return tracing.under(rpc, traceparent, attributes)


def end_call(span: Span, code: grpc.StatusCode, message: str) -> None:
    span.set({"rpc.grpc.status_code": code.value[0]})
    if code in _FAULTS:
        span.fail(code.name, message)
    elif code is not grpc.StatusCode.OK:
        span.set({"error.type": code.name})
    span.end()


@contextmanager
def part(span: Span | None, name: str, attributes: Mapping[str, int] | None = None) -> Iterator[None]:
    """Around a part of the call's work."""
    child = None if span is None else span.child(name, attributes)
    try:
        yield
    finally:
        if child is not None:
            child.end()
