"""Writes the result of a batch line for the output file or the error file, in OpenAI's format. Has no I/O."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rootstock_llm.services.gateway.batches.input_lines import Line
from rootstock_llm.services.gateway.store.batch_store import LineResult
from rootstock_llm.services.gateway.store.stored_files import ERRORS, OUTPUT
from rootstock_llm.services.shared.limits import MAX_BATCH_RESULT_BYTES

EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
_MESSAGES = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "The batch was cancelled before this request was executed.",
    "result_too_large": f"The response has more than {MAX_BATCH_RESULT_BYTES} bytes.",
    "store_full": "The store limit of this API key leaves no space for the result. Delete stored data.",
    "server_error": "The request could not be executed.",
}


@dataclass(frozen=True, slots=True)
class LineResponse:
    """The response of an endpoint to one line."""

    status: int  # HTTP status
    body: bytes  # JSON
    request_id: str


def answered(line: Line, answer: LineResponse) -> LineResult:
    """Returns the result of a computed line. A status of 200 puts it into the output file, any other into the error file.

    A response of more than MAX_BATCH_RESULT_BYTES becomes the error `result_too_large`.
    """
    if len(answer.body) > MAX_BATCH_RESULT_BYTES:
        return not_executed(line, "result_too_large")
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": orjson.Fragment(answer.body)}
    good = answer.status == 200
    usage = _usage(orjson.loads(answer.body).get("usage")) if good else {}
    return LineResult(line.number, OUTPUT if good else ERRORS, _line(line, response, None), not good, usage)


def not_executed(line: Line, code: str) -> LineResult:
    """Returns the error `code` as a line's result. The store accepts this small result even if the quota is full."""
    return LineResult(line.number, ERRORS, _line(line, None, {"code": code, "message": _MESSAGES[code]}), forced=True)


def _line(line: Line, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> bytes:
    result_id = f"batch_req_{secrets.token_hex(16)}"
    return orjson.dumps({"id": result_id, "custom_id": line.custom_id, "response": response, "error": error}) + b"\n"


def _usage(usage: Any) -> dict[str, int]:
    """Returns the token counts in an endpoint's `usage` object, by their names in USAGE. Leaves out counts of 0."""
    if not isinstance(usage, dict):
        return {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    output = usage.get("completion_tokens", usage.get("output_tokens", 0))
    of_prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    of_output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    found = {
        "input_tokens": prompt,
        "cached_tokens": of_prompt.get("cached_tokens", 0),
        "output_tokens": output,
        "reasoning_tokens": of_output.get("reasoning_tokens", 0),
    }
    return {name: amount for name, amount in found.items() if amount}
