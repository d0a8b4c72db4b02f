"""OpenAI chat messages, checked and without empty fields. Runs in the rendering process: standard library only.

The conventions follow transformers' apply_chat_template (null values left out, reasoning under every name that templates read,
continue_final_message by a tag). The forms in which a template gets a message are those of `history.template_forms`.
"""

from __future__ import annotations

import json
from typing import Any

from services.tokenizer.history.turns import Message

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class InvalidField(Exception):
    """The message names the field and says what is wrong with it, without its value."""


def parse(name: str, data: bytes, kind: type) -> Any:
    """The JSON value in `data`, None if it is empty. Raises InvalidField unless it is a `kind`."""
    if not data:
        return None
    try:
        value = json.loads(data)
    except RecursionError:
        raise InvalidField(f"{name}: nested too deeply") from None
    except ValueError:  # malformed, not UTF-8, or a number with too many digits
        raise InvalidField(f"{name}: not valid JSON") from None
    if not isinstance(value, kind):
        raise InvalidField(f"{name}: not {'an array' if kind is list else 'an object'}")
    return value


def prepare(messages: list[Any]) -> list[Message]:
    """Returns checked copies of the messages. A field that is null, `[]` or `{}` is left out. Raises InvalidField."""
    if not messages:
        raise InvalidField("messages: empty")
    return [_prepare_one(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _prepare_one(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidField(f"{where}: not an object")
    if not isinstance(message.get("role"), str):
        raise InvalidField(f"{where}.role: not a string")
    result = {name: value for name, value in message.items() if value is not None and value != [] and value != {}}
    if "content" in result:
        _check_content(result["content"], f"{where}.content")
    elif isinstance(result.get("refusal"), str):
        result["content"] = result["refusal"]
    if "tool_calls" in result:
        _check_calls(result["tool_calls"], f"{where}.tool_calls")
    elif isinstance(result.get("function_call"), dict):  # the API's older form of one call
        result["tool_calls"] = [{"type": "function", "function": result.pop("function_call")}]
    reasoning = next((result[name] for name in _REASONING_FIELDS if result.get(name)), None)
    for name in _REASONING_FIELDS:
        if result.get(name) == "":
            del result[name]
    return result if reasoning is None else {"thinking": reasoning, **result, "reasoning_content": reasoning}


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidField(f"{where}: neither a string nor an array of parts")
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidField(f"{where}[{at}]: not an object")
        if part.get("type") != "text":
            raise InvalidField(f"{where}[{at}].type: only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise InvalidField(f"{where}[{at}].text: not a string")


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise InvalidField(f"{where}: not an array")
    for at, call in enumerate(calls):
        if not isinstance(call, dict):
            raise InvalidField(f"{where}[{at}]: not an object")


def tag_final(messages: list[Message]) -> str:
    """Marks where the last message's text ends, so that cut_at_tag() finds it in the rendered chat. Returns that text."""
    final = messages[-1].get("content")
    if isinstance(final, list):
        part = final[-1]
        messages[-1]["content"] = [*final[:-1], {**part, "text": part["text"] + CONTINUE_TAG}]
        return str(part["text"])
    if final is None and "tool_calls" in messages[-1]:
        raise InvalidField(f"messages[{len(messages) - 1}].content: continue_final_message needs text to continue")
    messages[-1]["content"] = (final or "") + CONTINUE_TAG
    return final or ""


def cut_at_tag(rendered: str, final: str) -> str:
    """The rendered chat up to the end of the final message's text. Raises InvalidField if the template dropped or changed it."""
    at = rendered.rfind(CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in rendered:
        raise InvalidField("continue_final_message: the chat template does not show the final message as it is")
    keeps_spaces = rendered.startswith(CONTINUE_TAG, at)
    return rendered[:at] if keeps_spaces else rendered[:at].rstrip()
