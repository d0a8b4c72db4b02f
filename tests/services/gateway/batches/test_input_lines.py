"""Tests of batch input files: their lines, errors and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from rootstock_llm.services.gateway.batches.input_lines import Checked, check
from rootstock_llm.services.shared import limits

PATH = "/v1/completions"


def line(custom_id: str, **body: Any) -> bytes:
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": PATH, "body": body}) + b"\n"


def nested_line(levels: int) -> bytes:
    """Returns a line with `levels` levels of JSON, which include the line and its body."""
    return line("deep", d=0).replace(b'"d":0', b'"d":' + b"[" * (levels - 2) + b"]" * (levels - 2))


def checked(content: bytes, max_lines: int = limits.MAX_BATCH_LINES, piece: int = 1 << 20) -> Checked:
    """Checks a file that arrives in pieces of `piece` bytes."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), piece):
            yield content[at : at + piece]

    return asyncio.run(check(pieces(), PATH, max_lines))


def codes(found: Checked) -> list[tuple[int | None, str]]:
    return [(error.line, error.code) for error in found.errors]


@pytest.mark.parametrize("piece", [pytest.param(1, id="bytes"), pytest.param(7, id="pieces"), pytest.param(1 << 20, id="whole")])
def test_result_of_checking_input_lines_is_the_same_for_any_division_into_pieces(piece: int) -> None:
    content = line("a", model="m") + b"\n \r\n" + line("b", model="m").replace(b"\n", b"\r\n") + line("c", model="m")[:-1]
    assert checked(content, piece=piece) == Checked(3, 5, "m", ())


def test_value_at_a_limit_is_accepted_and_a_larger_value_is_refused() -> None:
    spare = limits.MAX_BATCH_LINE_BYTES - len(line("a", prompt="")[:-1])
    assert not checked(line("a", prompt="x" * spare)).errors
    assert codes(checked(line("a", prompt="x" * (spare + 1)) + line("b"))) == [(1, "line_too_large")]
    most = limits.MAX_CUSTOM_ID_CHARS
    assert not checked(line("x" * most)).errors and codes(checked(line("x" * (most + 1)))) == [(1, "invalid_custom_id")]
    assert not checked(nested_line(limits.MAX_JSON_DEPTH)).errors
    too_deep = nested_line(limits.MAX_JSON_DEPTH + 1) + line("b") + nested_line(300)
    assert codes(checked(too_deep)) == [(1, "invalid_json_line"), (3, "invalid_json_line")]
    lines = [line(str(number)) for number in range(limits.MAX_BATCH_LINES + 1)]
    assert checked(b"".join(lines[:-1])).total == limits.MAX_BATCH_LINES
    assert codes(checked(b"".join(lines))) == [(limits.MAX_BATCH_LINES + 1, "too_many_lines")]
    assert codes(checked(b"".join(lines[:4]), max_lines=3)) == [(4, "too_many_lines")]
    assert len(checked(b"x\n" * 1000).errors) == limits.MAX_BATCH_ERRORS


def test_model_of_the_input_is_known_when_all_lines_have_the_same_model() -> None:
    assert [checked(line("a", model="m") + second).model for second in (b"", line("b"), line("b", model="n"))] == ["m", "", ""]


def test_model_name_is_ignored_when_too_long() -> None:
    assert checked(line("a", model="m" * 5000) + line("b", model="m" * 5000)).model == ""
