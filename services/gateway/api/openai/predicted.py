"""A chat's `prediction`, as OpenAI has it: text that its answer may turn out to be. Pure; raises ApiError naming the element."""

from __future__ import annotations

from typing import Any

from services.gateway.api.openai.chat_call import check_part
from services.gateway.request.budgets import check_chars
from services.gateway.request.errors import bad_request
from services.shared import limits


def predicted_text(prediction: Any) -> str | None:
    """None where there is none."""
    if prediction is None:
        return None
    if not isinstance(prediction, dict):
        raise bad_request("prediction", "'prediction' must be an object.")
    if prediction.get("type") != "content":
        raise bad_request("prediction.type", "'prediction.type' must be 'content'.")
    text = _text(prediction.get("content"))
    check_chars(len(text), "prediction")
    return text


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("prediction.content", "'prediction.content' must be a string or a list of content parts.")
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise bad_request("prediction.content", f"'prediction.content' may have at most {limits.MAX_CONTENT_PARTS} parts.")
    for index, part in enumerate(content):
        check_part(part, f"prediction.content[{index}]")
    return "".join(part["text"] for part in content)
