"""OpenAI chat messages as a template wants them. Runs in the rendering process: standard library only.

Source of the conventions: transformers' apply_chat_template (null values left out, reasoning under every name that templates
read, continue_final_message by a tag) and SGLang's chat handling (list content joined with spaces where the template wants a
string, tool call arguments given as objects).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template wants an assistant's calls. as_text: arguments as JSON in a string, as the API has them, for templates that
    put them in as they are; otherwise the object, for those that print it with tojson. null_content: a message without text has
    `content`, which is none; otherwise it has no `content`. short_ids: ids of calls have nine letters and digits, as Mistral's
    templates demand; others become a digest, the same in the call and in what came of it."""

    as_text: bool = False
    null_content: bool = False
    short_ids: bool = False


USUAL_CALLS = CallForm()
_WITH_ANY_ID = (USUAL_CALLS, CallForm(null_content=True), CallForm(as_text=True), CallForm(as_text=True, null_content=True))
CALL_FORMS = (*_WITH_ANY_ID, *(replace(form, short_ids=True) for form in _WITH_ANY_ID))

PROBE = "a7f3c9"  # an argument that no template says by itself
PROBE_REPR = f"'what': '{PROBE}'"  # as Python prints it, which is no JSON
_PROBE_ID = "call_5f0c1d2e3a4b59687786a5b4"  # as this server makes them
_PROBE_CALL = {"id": _PROBE_ID, "type": "function", "function": {"name": "find", "arguments": f'{{"what": "{PROBE}"}}'}}
PROBE_CHAT: list[Message] = [
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": None, "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "tool_call_id": _PROBE_ID, "content": "There."},
]


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


def have_calls(messages: list[Any]) -> bool:
    return any(isinstance(message, dict) and message.get("tool_calls") for message in messages)


def prepare(
    messages: list[Any], content_as_string: bool, form: CallForm = USUAL_CALLS, has_developer: bool = True
) -> list[Message]:
    """Checked copies of the messages. has_developer: the template knows this role; otherwise it is another name of `system`.
    Raises InvalidField."""
    if not messages:
        raise InvalidField("messages: empty")
    found = [_prepare_one(message, f"messages[{at}]", content_as_string, form) for at, message in enumerate(messages)]
    return found if has_developer else _without_developer(found)


def _without_developer(messages: list[Message]) -> list[Message]:
    """Behind a leading system message it is joined to that: many templates have room for one."""
    found = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    is_joined = len(found) > 1 and messages[1]["role"] == "developer" and messages[0]["role"] in ("system", "developer")
    texts = [message.get("content") for message in found[:2]]
    if not is_joined or not all(isinstance(text, str) for text in texts):
        return found
    return [{**found[0], "content": "\n\n".join(map(str, texts))}, *found[2:]]


def _prepare_one(message: Any, where: str, content_as_string: bool, form: CallForm) -> Message:
    if not isinstance(message, dict):
        raise InvalidField(f"{where}: not an object")
    if not isinstance(message.get("role"), str):
        raise InvalidField(f"{where}.role: not a string")
    result = {key: value for key, value in message.items() if value is not None}
    if "content" in result:
        result["content"] = _content(result["content"], f"{where}.content", content_as_string)
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls", form)
        if form.null_content and result["tool_calls"] and not result.get("content"):
            result["content"] = None
    if form.short_ids and isinstance(result.get("tool_call_id"), str):
        result["tool_call_id"] = _short_id(result["tool_call_id"])
    reasoning = next((result[name] for name in _REASONING_FIELDS if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _content(content: Any, where: str, as_string: bool) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(f"{where}: neither a string nor an array of parts")
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidField(f"{where}[{at}]: not an object")
        if part.get("type") != "text":
            raise InvalidField(f"{where}[{at}].type: only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise InvalidField(f"{where}[{at}].text: not a string")
    return " ".join(part["text"] for part in content) if as_string else content


def _tool_calls(calls: Any, where: str, form: CallForm) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidField(f"{where}: not an array")
    for at, call in enumerate(calls):
        if not isinstance(call, dict):
            raise InvalidField(f"{where}[{at}]: not an object")
    if form.short_ids:
        calls = [{**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call for call in calls]
    return calls if form.as_text else [_with_parsed_arguments(call) for call in calls]


def _short_id(given: str) -> str:
    return given if _SHORT_ID.fullmatch(given) else blake2b(given.encode(errors="replace")).hexdigest()[:9]


def _with_parsed_arguments(call: Message) -> Message:
    """The API has a call's arguments as JSON in a string."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


def tag_final(messages: list[Message]) -> str:
    """Marks where the last message's text ends, so that cut_at_tag() finds it in the rendered chat. Returns that text."""
    where = f"messages[{len(messages) - 1}].content"
    final = messages[-1].get("content")
    if isinstance(final, str):
        messages[-1]["content"] = final + CONTINUE_TAG
        return final
    if not final:
        raise InvalidField(f"{where}: continue_final_message needs text to continue")
    part = final[-1]
    final[-1] = {**part, "text": part["text"] + CONTINUE_TAG}
    return str(part["text"])


def cut_at_tag(rendered: str, final: str) -> str:
    """The rendered chat up to the end of the final message's text. Raises InvalidField if the template dropped or changed it."""
    at = rendered.rfind(CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in rendered:
        raise InvalidField("continue_final_message: the chat template does not show the final message as it is")
    keeps_spaces = rendered.startswith(CONTINUE_TAG, at)
    return rendered[:at] if keeps_spaces else rendered[:at].rstrip()
