"""Tests of the results of batch lines, as they are written to the result files."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rootstock_llm.services.gateway.batches.input_lines import Line
from rootstock_llm.services.gateway.batches.line_results import LineResponse, answered
from rootstock_llm.services.gateway.store.stored_files import ERRORS, OUTPUT
from rootstock_llm.services.shared.limits import MAX_BATCH_RESULT_BYTES

LINE = Line(7, "a", b"{}", "m", False)


def answer(size: int) -> LineResponse:
    return LineResponse(200, b'{"a":"%s"}' % (b"x" * (size - 8)), "request-a")


def test_result_that_is_too_large_becomes_an_error() -> None:
    at, beyond = (answered(LINE, answer(size)) for size in (MAX_BATCH_RESULT_BYTES, MAX_BATCH_RESULT_BYTES + 1))
    assert (at.part, at.forced, beyond.part, beyond.forced) == (OUTPUT, False, ERRORS, True)
    result = orjson.loads(beyond.content)
    assert (result["custom_id"], result["response"], result["error"]["code"]) == ("a", None, "result_too_large")


@pytest.mark.parametrize(
    "usage",
    [
        pytest.param(
            {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 1},
            },
            id="of chats",
        ),
        pytest.param(
            {
                "input_tokens": 5,
                "output_tokens": 3,
                "input_tokens_details": {"cached_tokens": 2},
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            id="of responses",
        ),
    ],
)
def test_usage_of_a_line_result_has_the_same_form_for_every_endpoint(usage: dict[str, Any]) -> None:
    found = answered(LINE, LineResponse(200, orjson.dumps({"usage": usage}), "request-a"))
    assert found.usage == {"input_tokens": 5, "cached_tokens": 2, "output_tokens": 3, "reasoning_tokens": 1}
