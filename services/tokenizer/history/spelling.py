"""The forms in which a template can get a message: content, arguments of calls, ids of calls. Standard library only; no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from services.tokenizer.history.turns import Message, text_of

ContentKind = Literal["text", "parts", "missing"]
# given: the client's parts. text: a string, empty for missing content. part: a list with one part. null: None. absent: no field.
ContentForm = Literal["given", "text", "part", "null", "absent"]
# object: a mapping. text: a string, as in the API. named: a mapping with the text as the value of TEXT_NAME.
ArgumentsForm = Literal["object", "text", "named"]
CONTENT_FORMS: dict[ContentKind, tuple[ContentForm, ...]] = {
    "text": ("text", "part"),
    "parts": ("given", "text", "part"),
    "missing": ("text", "null", "absent", "part"),
}
TEXT_NAME = "arguments"  # the only name in a `named` object
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The forms of a message."""

    content: ContentForm = "text"
    arguments: ArgumentsForm = "object"
    short_ids: bool = False  # ids of calls have nine letters and digits; other ids become a digest


def content_kind(message: Message) -> ContentKind:
    content = message.get("content")
    if isinstance(content, str):
        return "text" if content else "missing"
    return "missing" if content is None else "parts"


def with_content(message: Message, form: ContentForm) -> Message:
    """Returns the message itself if its content has this form already."""
    if form == "given" or (form == "text" and isinstance(message.get("content"), str)):
        return message
    rest = {name: value for name, value in message.items() if name != "content"}
    if form == "absent":
        return rest
    text = text_of(message)
    content: Any = None if form == "null" else text if form == "text" else [{"type": "text", "text": text}]
    return {"role": message["role"], "content": content, **rest}


def arguments_of(call: Any) -> dict[str, Any] | str | None:
    """Returns the arguments of a call.

    Returns:
        The object; the text itself if it is not a JSON object; None for a call without a function.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        return None
    given = function.get("arguments")
    if given is None or given == "" or isinstance(given, dict):
        return given or {}
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False)
    try:
        parsed = json.loads(given)
        if "\\u" in given:
            parsed = json.loads(_whole_pairs(json.dumps(parsed, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


def _whole_pairs(text: str) -> str:
    """Returns the text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_arguments(call: Any, arguments: dict[str, Any] | str, form: ArgumentsForm) -> Any:
    """Returns the call with arguments in this form. The arguments are those that arguments_of() returned."""
    value: Any = arguments
    if form == "text" and not isinstance(arguments, str):
        given = call["function"].get("arguments")
        value = given if isinstance(given, str) and given else json.dumps(arguments, ensure_ascii=False)
    elif form == "named":
        value = {TEXT_NAME: arguments}
    return {**call, "function": {**call["function"], "arguments": value}}


def with_short_ids(message: Message, index: int) -> Message:
    """Returns the message with short ids in its calls and in tool_call_id.

    Args:
        index: index of the message in the chat, part of the id of a call that has no id.
    """
    if isinstance(message.get("tool_call_id"), str):
        message = {**message, "tool_call_id": short_id(message["tool_call_id"])}
    calls: Sequence[Any] = message.get("tool_calls", ())
    if calls:
        ids = [call.get("id") for call in calls]
        named = [given if isinstance(given, str) else f"{index}-{at}" for at, given in enumerate(ids)]
        message = {**message, "tool_calls": [{**call, "id": short_id(name)} for call, name in zip(calls, named, strict=True)]}
    return message


def short_id(given: str) -> str:
    return given if _SHORT_ID.fullmatch(given) else blake2b(given.encode(errors="replace")).hexdigest()[:9]
