"""The access log: one line for each HTTP request, batch line, background response and admin request when it ends.

A line never contains text of a prompt or a completion, a secret or a query string.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, TypedDict

import orjson

from rootstock_llm.services.shared.observe import log_fields

logger = logging.getLogger(__name__)

Form = Literal["json", "text", "off"]

# Entries of scope["state"] that routes set for the access log.
ERROR_CODE = "error_code"  # code of the ApiError that ended the request
CUT = "cut"  # the gateway closed the connection before the response was complete
INTERRUPTED = "interrupted"  # the batch line or background response was cancelled before its end
ABORTED = "aborted"  # at least one choice was aborted
GENERATION = "generation"  # the GenerationFields of a generation request
_SAME_FIELDS = b'"level":"info","service":"gateway","logger":"access","msg":"request",'  # part of every JSON line
_GONE = 499  # status of a request whose client disconnected
_CHECK_S = 1.0  # seconds between two checks whether the file was rotated
_PROBES = frozenset(("/health", "/ping", "/readiness", "/ready", "/metrics"))  # routes whose requests are not logged


class End(StrEnum):
    """The kind of a request's end."""

    COMPLETE = "complete"
    REFUSED = "refused"  # the response is an error
    FAILED = "failed"  # a stream that had begun ended with an error event
    ABORTED = "aborted"  # an operator or the client's abort call ended a choice; the response has the output so far
    CLIENT_GONE = "client_gone"
    CUT = "cut"  # the client did not read, and the gateway closed the connection
    INTERRUPTED = "interrupted"  # a batch line or background response was cancelled, or continues at another gateway


class GenerationFields(TypedDict):
    """The fields of one line about tokens and times. All are None for requests that generate no tokens."""

    queue_ms: float | None  # longest wait of a choice at the gateway, plus the longest wait of a choice at its worker
    ttft_ms: float | None  # milliseconds from arrival to the first output; also None without output
    prompt_tokens: int | None  # each prompt counts once, as in `usage`
    cached_tokens: int | None  # prompt tokens whose KV was read from a prefix cache
    output_tokens: int | None
    trace_id: str | None  # also None if the request is not traced


class AccessRecord(GenerationFields):
    """The fields of one line."""

    request_id: str
    source: str  # "http", "batch", "background" or "admin"
    method: str
    route: str  # path template as in the metrics' label, or "other"
    model: str  # name of the model; "" if the request failed before its model was found
    key: str  # name of the API key; "" if the gateway has no API keys, or the request has no valid one
    status: int  # HTTP status; 499 if the client closed its connection; 0 if no response was begun
    code: str  # error code; "" without an error
    end: str  # value of an End
    total_ms: float  # milliseconds from the request's head to the end of its response
    bytes: int  # size of the response's body


_NO_GENERATION: GenerationFields = {
    "queue_ms": None,
    "ttft_ms": None,
    "prompt_tokens": None,
    "cached_tokens": None,
    "output_tokens": None,
    "trace_id": None,
}


class AccessLog:
    """Writes one record per request as JSON or text, or nothing if the form is "off". Called on the event loop.

    It does not use the logging module, which would take three times as long per record.
    """

    def __init__(self, form: Form, path: str = "") -> None:
        """Opens the file.

        Args:
            path: File to which lines are appended; "" for standard error. A missing folder is created. Another program may rotate
                the file by moving it away.

        Raises:
            OSError: The file cannot be opened.
        """
        self.enabled = form != "off"
        self._line = _json_line if form == "json" else _text_line
        self._file = _LineFile(path) if self.enabled else None

    def ended(
        self, source: str, method: str, route: str, state: Mapping[str, Any], status: int, num_bytes: int, seconds: float
    ) -> None:
        """Writes the record of a request that ended.

        Args:
            source: "http", "batch", "background" or "admin".
            route: Path or path template.
            state: The request's scope["state"].
            status: HTTP status that was sent; 0 if no status was sent.
            num_bytes: Sent bytes of the response's body.
            seconds: Time from the request's head to the end of the response.
        """
        if self._file is None or route in _PROBES:
            return
        status = state.get("code", status)
        generation: GenerationFields = state.get(GENERATION, _NO_GENERATION)
        code = str(state.get(ERROR_CODE) or ("client_gone" if status == _GONE else ""))
        record: AccessRecord = {
            "request_id": state["request_id"],
            "source": source,
            "method": method,
            "route": route,
            "model": state.get("model", ""),
            "key": state.get("key", ""),
            "status": status,
            "code": code,
            "end": _end_of(status, code, state),
            "total_ms": round(seconds * 1e3, 1),
            "bytes": num_bytes,
            **generation,
        }
        self._file.append(self._line(record, time.time()))

    def refused(self, status: int, code: str, num_bytes: int) -> None:
        """Writes the record of a request that the connection has refused before its route was known."""
        self.ended("http", "", "other", {"request_id": "", ERROR_CODE: code}, status, num_bytes, 0.0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None  # requests that end later are not logged


class _LineFile:
    """The file of the log, or standard error. Opens the path again if the file was rotated.

    All lines of one iteration of the event loop are written together.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._checked_at = time.monotonic()
        self._failing = False
        self._lines: list[bytes] = []
        self._file = self._open() if path else sys.stderr.fileno()

    def append(self, line: bytes) -> None:
        """Queues a line. If lines cannot be written, for example on a full disk, drops them and logs the first failure."""
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        self._lines.append(line)

    def _flush(self) -> None:
        text, self._lines = b"".join(self._lines), []
        try:
            if self._path and time.monotonic() - self._checked_at >= _CHECK_S:
                self._reopen_if_rotated()
            while text:
                text = text[os.write(self._file, text) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning("could not write the access log", extra=log_fields.fields(error=str(error.strerror)))
            self._failing = True

    def close(self) -> None:
        self._flush()
        if self._path:
            os.close(self._file)

    def _reopen_if_rotated(self) -> None:
        self._checked_at = time.monotonic()
        if not os.path.exists(self._path) or not os.path.samestat(os.stat(self._path), os.fstat(self._file)):
            opened = self._open()
            os.close(self._file)
            self._file = opened

    def _open(self) -> int:
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _json_line(record: AccessRecord, now: float) -> bytes:
    """Returns the record in the JSON form of all log lines (services/shared/observe/log.py). `now` is in Unix seconds."""
    stamp = f'{{"ts":"{_utc(int(now))}.{int(now % 1 * 1000):03d}Z",'
    return stamp.encode() + _SAME_FIELDS + orjson.dumps(record)[1:] + b"\n"


def _text_line(record: AccessRecord, now: float) -> bytes:
    """Returns time, method, route, status and end, and then all other fields as name=value. `now` is in Unix seconds."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    head = f"{moment} {record['method'] or '-'} {record['route']} {record['status']} {record['end']}"
    others = [(name, value) for name, value in record.items() if name not in _IN_HEAD]
    return " ".join([head, *(f"{name}={value}" for name, value in others if value not in (None, ""))]).encode() + b"\n"


@lru_cache(maxsize=1)
def _utc(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


_IN_HEAD = frozenset(("method", "route", "status", "end"))


def _end_of(status: int, code: str, state: Mapping[str, Any]) -> End:
    if status == _GONE:
        return End.CLIENT_GONE
    if state.get(CUT):
        return End.CUT
    if state.get(INTERRUPTED):
        return End.INTERRUPTED
    if status >= 400:
        return End.REFUSED
    if code or not status:
        return End.FAILED
    return End.ABORTED if state.get(ABORTED) else End.COMPLETE
