"""The access log: one line for each HTTP request, batch line and background response when it ends.

A line never holds text of a prompt or a completion, a secret or a query string.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from enum import StrEnum
from logging.handlers import WatchedFileHandler
from typing import Any, Literal

from services.shared.observe.log import JsonFormatter
from services.shared.observe.log_fields import FIELDS, fields

Form = Literal["json", "text", "off"]

# Keys of scope["state"] that routes fill in for the access log.
ERROR_CODE = "error_code"  # code of the ApiError that ended the request
CUT = "cut"  # the gateway closed the connection before the response was complete
WORK = "work"  # a Work
_GONE = 499  # status of a request whose client left
_PROBES = frozenset(("/health", "/ping", "/readiness", "/ready", "/metrics"))


class End(StrEnum):
    """The kind of a request's end."""

    COMPLETE = "complete"
    REFUSED = "refused"  # the response is an error
    FAILED = "failed"  # a stream that had begun ended with an error event
    ABORTED = "aborted"  # an operator or another call of the client aborted a choice; the response has the output so far
    CLIENT_GONE = "client_gone"
    CUT = "cut"  # the client did not read, and the gateway closed the connection


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens and times of one generation request, up to its end."""

    trace_id: str  # "" if the request is not traced
    queue_ms: float  # longest wait of a choice, at the gateway and at its worker
    ttft_ms: float | None  # from arrival to the first output; None if there was none
    prompt_tokens: int  # each prompt counts once, as in `usage`
    cached_tokens: int  # prompt tokens that a prefix cache had
    output_tokens: int
    aborted: bool  # at least one choice was aborted


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """One line. Fields of Work are None for a request that generates nothing."""

    request_id: str
    source: str  # "http", "batch" or "background"
    method: str
    route: str  # as in the metric's label: a template without ids, or "other"
    model: str  # "" until a model was found
    key: str  # name of the API key; "" if there are no keys or none was valid
    status: int  # HTTP status; 499 if the client left; 0 if no response was begun
    code: str  # error code; "" without an error
    end: str  # an End
    total_ms: float  # from the request's head to the end of its response
    bytes: int  # size of the response's body
    queue_ms: float | None
    ttft_ms: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    trace_id: str | None


_FIELDS = tuple(field.name for field in fields_of(AccessRecord))


class AccessLog:
    """Writes records as JSON or as text, or none. Called on the event loop."""

    def __init__(self, form: Form, path: str = "") -> None:
        """path: file that lines are appended to, made anew if it is moved away; "" is standard error. Raises OSError."""
        self.enabled = form != "off"
        self._logger = logging.Logger("access", logging.INFO)  # its level does not follow the process's log level
        if self.enabled:
            handler = WatchedFileHandler(path) if path else logging.StreamHandler(sys.stderr)
            handler.setFormatter(JsonFormatter("gateway") if form == "json" else _TextFormatter())
            self._logger.addHandler(handler)

    def ended(
        self, source: str, method: str, route: str, state: Mapping[str, Any], status: int, num_bytes: int, seconds: float
    ) -> None:
        """Writes the record of a request that ended.

        Args:
            source: "http", "batch" or "background".
            route: path or path template.
            state: the request's scope["state"].
            status: HTTP status that was sent; 0 if none was.
            num_bytes: bytes of the response's body that were sent.
            seconds: from the request's head to its end.
        """
        if not self.enabled or route in _PROBES:
            return
        status = state.get("code", status)
        work: Work | None = state.get(WORK)
        code = str(state.get(ERROR_CODE) or ("client_gone" if status == _GONE else ""))
        record = AccessRecord(
            request_id=state["request_id"],
            source=source,
            method=method,
            route=route,
            model=state.get("model", ""),
            key=state.get("key", ""),
            status=status,
            code=code,
            end=_end_of(status, code, bool(state.get(CUT)), work),
            total_ms=round(seconds * 1e3, 1),
            bytes=num_bytes,
            queue_ms=None if work is None else round(work.queue_ms, 1),
            ttft_ms=None if work is None or work.ttft_ms is None else round(work.ttft_ms, 1),
            prompt_tokens=None if work is None else work.prompt_tokens,
            cached_tokens=None if work is None else work.cached_tokens,
            output_tokens=None if work is None else work.output_tokens,
            trace_id=None if work is None or not work.trace_id else work.trace_id,
        )
        values = {name: value for name in _FIELDS if (value := getattr(record, name)) is not None}
        self._logger.info("request", extra=fields(**values))

    def refused(self, status: int, code: str, num_bytes: int) -> None:
        """Writes the record of a request that the connection refused before any route was known."""
        self.ended("http", "", "other", {"request_id": "", ERROR_CODE: code}, status, num_bytes, 0.0)

    def close(self) -> None:
        for handler in self._logger.handlers:
            handler.close()


class _TextFormatter(logging.Formatter):
    """Renders a record as one line: time, method, route, status, end, then the other fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        values = dict(getattr(record, FIELDS))
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        head = f"{moment} {values.pop('method') or '-'} {values.pop('route')} {values.pop('status')} {values.pop('end')}"
        return " ".join([head, *(f"{name}={value}" for name, value in values.items() if value != "")])


def _end_of(status: int, code: str, cut: bool, work: Work | None) -> End:
    if status == _GONE:
        return End.CLIENT_GONE
    if cut:
        return End.CUT
    if status >= 400:
        return End.REFUSED
    if code or not status:
        return End.FAILED
    return End.ABORTED if work is not None and work.aborted else End.COMPLETE
