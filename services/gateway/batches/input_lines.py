"""A batch's input, line by line: what each asks for, or what is wrong with it. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.api.strict_json import load_json
from services.shared import limits

METHOD = "POST"
SEVERAL = 2  # models are as good as any number
MOST_MODEL_CHARS = 256  # of a name that is remembered
LINES_A_TURN = 256


@dataclass(eq=False)
class BadLine(Exception):
    """As OpenAI's BatchError has it. line: its number, from 1; None: of no line."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class Line:
    """number: in the input, from 1. body: of the request, JSON. model: that it names, "" for none. streams: it asks for a stream,
    which a line cannot have."""

    number: int
    custom_id: str
    body: bytes
    model: str
    streams: bool


async def numbered(content: AsyncIterable[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1. One that is too long comes cut behind its limit."""
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
                await asyncio.sleep(0)  # others have the loop meanwhile
        rest += last[: most - len(rest)]
    if rest.strip():
        yield number, bytes(rest)


def read_line(number: int, content: bytes, endpoint: str) -> Line:
    """Raises BadLine."""
    if len(content) > limits.MAX_BATCH_LINE_BYTES:
        raise BadLine("line_too_large", f"The line has more than {limits.MAX_BATCH_LINE_BYTES} bytes.", None, number)
    asked = _json(number, content)
    custom_id, body = asked.get("custom_id"), asked.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= limits.MAX_CUSTOM_ID_CHARS:
        message = f"'custom_id' must be a text of 1 to {limits.MAX_CUSTOM_ID_CHARS} characters."
        raise BadLine("invalid_custom_id", message, "custom_id", number)
    if asked.get("method") != METHOD:
        raise BadLine("invalid_method", f"'method' must be {METHOD}.", "method", number)
    if asked.get("url") != endpoint:
        raise BadLine("mismatched_endpoint", "'url' must be the batch's endpoint.", "url", number)
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "'body' must be an object.", "body", number)
    model = body.get("model")
    return Line(number, custom_id, orjson.dumps(body), model if isinstance(model, str) else "", bool(body.get("stream")))


def _json(number: int, content: bytes) -> dict[str, Any]:
    try:
        asked = load_json(content)
    except orjson.JSONDecodeError as error:
        raise BadLine("invalid_json_line", f"The line is not valid JSON: {error.msg}.", None, number) from None
    if not isinstance(asked, dict):
        raise BadLine("invalid_json_line", "The line must be a JSON object.", None, number)
    return asked


@dataclass(frozen=True, slots=True)
class Checked:
    """What an input comes to. total: lines. last: number of its last one. model: that all its lines name, "" where they do not.
    errors: the first ones; none: it is right."""

    total: int
    last: int
    model: str
    errors: tuple[BadLine, ...]


async def check(content: AsyncIterable[bytes], endpoint: str, most_lines: int) -> Checked:
    """Reads all of it, or as far as there is no room for more errors."""
    seen: dict[str, int] = {}
    models: set[str] = set()
    errors: list[BadLine] = []
    number = 0
    async for number, line in numbered(content):
        try:
            asked = _fresh(read_line(number, line, endpoint), seen)
            if len(models) < SEVERAL:
                models.add(asked.model[: MOST_MODEL_CHARS + 1])
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


def _fresh(line: Line, seen: dict[str, int]) -> Line:
    """Raises BadLine."""
    before = seen.setdefault(line.custom_id, line.number)
    if before != line.number:
        raise BadLine("duplicate_custom_id", f"Line {before} has the same 'custom_id'.", "custom_id", line.number)
    return line
