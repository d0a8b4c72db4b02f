"""Parses and checks the lines of a batch's input. Has no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.request_body import load_json
from rootstock_llm.services.shared import limits

METHOD = "POST"
SEVERAL = 2  # number of different models after which check() collects no more names, because the batch has no single model
MOST_MODEL_CHARS = 256  # longest model name that the record of a batch has
LINES_A_TURN = 256  # number of lines after which numbered() lets other tasks run


@dataclass(eq=False)
class BadLine(Exception):
    """A fault of the input, with the fields of OpenAI's BatchError. The batch fails."""

    code: str
    message: str
    param: str | None = None  # invalid member of the line, or None if the fault is not in one member
    line: int | None = None  # number of the line, from 1, or None for a fault of the whole input

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a batch's input, which is one request."""

    number: int  # number in the input, from 1
    custom_id: str
    body: bytes  # JSON of the request's body
    model: str  # model that the body names; "" if none
    streams: bool  # the body requests a stream, which a batch does not support; the line gets an error


async def numbered(content: AsyncIterable[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers from 1.

    A line above the size limit is truncated to one byte more than the limit. The truncated line needs little memory, and
    read_line() refuses it.
    """
    number, rest, most = 1, bytearray(), limits.MAX_BATCH_LINE_BYTES + 1
    async for piece in content:
        *whole, last = piece.split(b"\n")
        for part in whole:
            rest += part[: most - len(rest)]
            if rest.strip():
                yield number, bytes(rest)
            rest.clear()
            number += 1
            if not number % LINES_A_TURN:
                await asyncio.sleep(0)
        rest += last[: most - len(rest)]
    if rest.strip():
        yield number, bytes(rest)


def read_line(number: int, content: bytes, endpoint: str) -> Line:
    """Parses a line. Raises BadLine."""
    if len(content) > limits.MAX_BATCH_LINE_BYTES:
        raise BadLine("line_too_large", f"The line has more than {limits.MAX_BATCH_LINE_BYTES} bytes.", None, number)
    parsed = _json(number, content)
    custom_id, body = parsed.get("custom_id"), parsed.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= limits.MAX_CUSTOM_ID_CHARS:
        message = f"'custom_id' must be a text of 1 to {limits.MAX_CUSTOM_ID_CHARS} characters."
        raise BadLine("invalid_custom_id", message, "custom_id", number)
    if parsed.get("method") != METHOD:
        raise BadLine("invalid_method", f"'method' must be {METHOD}.", "method", number)
    if parsed.get("url") != endpoint:
        raise BadLine("mismatched_endpoint", "'url' must be the batch's endpoint.", "url", number)
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "'body' must be an object.", "body", number)
    model = body.get("model")
    return Line(number, custom_id, orjson.dumps(body), model if isinstance(model, str) else "", bool(body.get("stream")))


def _json(number: int, content: bytes) -> dict[str, Any]:
    try:
        parsed = load_json(content)
    except orjson.JSONDecodeError as error:
        raise BadLine("invalid_json_line", f"The line is not valid JSON: {error.msg}.", None, number) from None
    if not isinstance(parsed, dict):
        raise BadLine("invalid_json_line", "The line must be a JSON object.", None, number)
    return parsed


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of check()."""

    total: int  # number of lines that are not blank
    last: int  # number of the last line that was read, from 1
    model: str  # model of all lines; "" if the lines have different models or none
    errors: tuple[BadLine, ...]  # the first faults; empty if the input is valid


async def check(content: AsyncIterable[bytes], endpoint: str, most_lines: int) -> Checked:
    """Checks an input. Stops at the end of the input, after MAX_BATCH_ERRORS faults, or after one line more than `most_lines`."""
    seen: dict[str, int] = {}
    models: set[str] = set()
    errors: list[BadLine] = []
    number = 0
    async for number, line in numbered(content):
        try:
            parsed = _check_custom_id(read_line(number, line, endpoint), seen)
            if len(models) < SEVERAL:
                models.add(parsed.model[: MOST_MODEL_CHARS + 1])
        except BadLine as error:
            errors.append(error)
        if len(seen) > most_lines:
            errors.append(BadLine("too_many_lines", f"The input has more than {most_lines} lines.", None, number))
            break
        if len(errors) >= limits.MAX_BATCH_ERRORS:
            break
    if not seen and not errors:
        errors.append(BadLine("empty_file", "The input has no lines."))
    model = models.pop() if len(models) == 1 else ""
    return Checked(len(seen), number, model if len(model) <= MOST_MODEL_CHARS else "", tuple(errors))


def _check_custom_id(line: Line, seen: dict[str, int]) -> Line:
    """Records the line's custom_id in `seen`. Raises BadLine if an earlier line has the same custom_id."""
    before = seen.setdefault(line.custom_id, line.number)
    if before != line.number:
        raise BadLine("duplicate_custom_id", f"Line {before} has the same 'custom_id'.", "custom_id", line.number)
    return line
