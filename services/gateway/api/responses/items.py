"""Checks a client's items of the Responses API, assigns their ids, and translates items into messages of a chat.

Pure. An ApiError names the invalid element.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rootstock_llm.services.gateway.api.known_fields import hosted_type
from rootstock_llm.services.gateway.api.request_body import arguments_text
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.shared import limits

Json = dict[str, Any]

REFERENCE = "item_reference"
_SEAL_MARK = "rr1."  # prefix of `encrypted_content`, with the version of its format; see sealed()
_SEAL_CHECK_BYTES = 8  # bytes of the checksum in `encrypted_content`
_ROLES = frozenset(("user", "system", "developer", "assistant"))
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TEXTS = {  # member that has the text, by type of part
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}
# Types of items for calls that the provider's server has run, and for their results. The gateway may omit them.
_HOSTED_CALLS = frozenset(
    (
        *("code_interpreter_call", "file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response"),
        *("mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call"),
    )
)
# Types of items that are refused. Hosted calls are refused only if the gateway does not omit them. The types added here are
# always refused: calls that the client has run itself, and a compacted history that only the vendor can read. Without these
# items, the conversation would lose content.
_UNSERVED = _HOSTED_CALLS | frozenset(
    (
        *("apply_patch_call", "apply_patch_call_output", "compaction", "computer_call", "computer_call_output"),
        *("custom_tool_call", "custom_tool_call_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output"),
    )
)


def checked_items(given: Any, where: str, omits_hosted: bool = False) -> list[Json]:
    """Returns a client's items in the stored form: every item has a type and an id, and texts are lists of parts.

    Args:
        given: The client's items, or a text, which becomes a user message.
        where: The client's field of the items.
        omits_hosted: Whether calls of hosted tools are omitted. If not, they are refused.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_request(where, f"'{where}' must be a string or a list of items.")
    if len(given) > limits.MAX_CHAT_MESSAGES:
        raise bad_request(where, f"'{where}' may have at most {limits.MAX_CHAT_MESSAGES} items.")
    left_out = _HOSTED_CALLS if omits_hosted else frozenset[str]()
    return [_checked(item, f"{where}[{index}]") for index, item in enumerate(given) if _kind(item) not in left_out]


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else ""


def new_id(kind: str, owner: str = "", index: int = 0) -> str:
    """Returns a new id for an item of the type `kind`.

    Args:
        owner: Id, without its prefix, of the response whose output has the item; "" for a client's item.
        index: Index of the item in the response's output.
    """
    return f"{_PREFIXES[kind]}_{owner}{index:04x}" if owner else f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"


def with_distinct_ids(items: Sequence[Json]) -> list[Json]:
    """Returns the items, with a new id for each item whose id an earlier item has.

    Clients read lists page by page and name the last item of a page by its id. With a repeated id, they would read the same page
    again without end.
    """
    seen: set[str] = set()
    found = []
    for item in items:
        own = {**item, "id": new_id(item["type"])} if item["id"] in seen else item
        seen.add(own["id"])
        found.append(own)
    return found


def response_of(item_id: str) -> str | None:
    """Returns the id of the response whose output has the item with this id. None for a client's item."""
    prefix, _, rest = item_id.partition("_")
    return f"resp_{rest[:-4]}" if prefix in _PREFIXES.values() and len(rest) == 36 else None


def messages_of(items: Iterable[Json]) -> list[Json]:
    """Returns the chat messages for the items.

    Consecutive items that the model wrote become one assistant message: first reasoning and text, then calls. Reasoning or text
    after a call begins a new message.
    """
    messages: list[Json] = []
    turn = _Turn()
    for item in items:
        is_output = _is_model_output(item)
        if not is_output or (item["type"] != "function_call" and turn.calls):
            messages += turn.messages()
            turn = _Turn()
        if is_output:
            turn.add(item)
        else:
            messages.append(_message_of(item))
    return messages + turn.messages()


def _is_model_output(item: Json) -> bool:
    return item["type"] in ("function_call", "reasoning") or item.get("role") == "assistant"


def _message_of(item: Json) -> Json:
    if item["type"] == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
    return {"role": item["role"], "content": _text(item["content"])}


@dataclass(slots=True)
class _Turn:
    """Consecutive items that the model wrote. The texts are joined once, because a turn may have thousands of items."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)  # without empty texts
    calls: list[Json] = field(default_factory=list)

    def add(self, item: Json) -> None:
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            self.calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif item["type"] == "message":
            self.texts.append(_text(item["content"]))
        elif text := _reasoning(item):
            self.reasoning.append(text)

    def messages(self) -> list[Json]:
        """Returns the turn's assistant message, or an empty list if the turn has no text, no reasoning and no call."""
        message: Json = {"role": "assistant", "content": "".join(self.texts) if self.texts else None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return [message] if self.texts or len(message) > 2 else []


def _reasoning(item: Json) -> str:
    """Returns the text of a reasoning item: its content, or else its decoded `encrypted_content`, or else its summary."""
    content = _text(item.get("content") or [])
    if not content and item.get("encrypted_content"):
        content = opened(item["encrypted_content"]) or ""
    return content or _text(item.get("summary") or [])


def _text(content: str | Sequence[Json]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def _checked(item: Any, where: str) -> Json:
    if not isinstance(item, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    kind = item.get("type") or ("message" if "role" in item else REFERENCE if set(item) - {"type"} == {"id"} else None)
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type", f"'{where}.type' is required.")
    if kind in _UNSERVED:
        message = f"'{where}.type': items of type '{kind}' are not supported by this server."
        raise bad_request(f"{where}.type", message, "unsupported_parameter")
    check = {
        "message": _message,
        "function_call": _call,
        "function_call_output": _call_output,
        "reasoning": _reasoning_item,
        REFERENCE: _reference,
    }.get(kind)
    if check is None:
        raise bad_request(f"{where}.type", f"'{where}.type' must be one of {', '.join((*_PREFIXES, REFERENCE))}.")
    found = check(item, where)
    return {"id": _id(item, kind, where), "type": kind, **found}


def _id(item: Json, kind: str, where: str) -> str:
    given = item.get("id")
    if given is None and kind != REFERENCE:
        return new_id(kind)
    if not isinstance(given, str) or not 0 < len(given) <= limits.MAX_STORED_ID_CHARS:
        raise bad_request(f"{where}.id", f"'{where}.id' must be a string of at most {limits.MAX_STORED_ID_CHARS} characters.")
    return given


def _message(item: Json, where: str) -> Json:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(f"{where}.role", f"'{where}.role' must be one of {', '.join(sorted(_ROLES))}.")
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    content = [] if content is None and role == "assistant" else _parts(content, f"{where}.content", kind)
    return {"role": role, "content": content, "status": "completed"}


def _parts(content: Any, where: str, kind: str) -> list[Json]:
    """Returns the checked content parts of an item. Raises ApiError.

    Args:
        kind: Type of the part that is made if the content is a string.
    """
    if isinstance(content, str):
        return [_part(kind, content)]
    if not isinstance(content, list):
        raise bad_request(where, f"'{where}' must be a string or a list of content parts.")
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise bad_request(where, f"'{where}' may have at most {limits.MAX_CONTENT_PARTS} parts.")
    return [_checked_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(kind: str, text: str) -> Json:
    more: Json = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, _TEXTS[kind]: text, **more}


def _checked_part(part: Any, where: str) -> Json:
    if not isinstance(part, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        message = f"'{where}.type': this server supports content parts with text only."
        raise bad_request(f"{where}.type", message, "unsupported_parameter")
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise bad_request(f"{where}.{_TEXTS[kind]}", f"'{where}.{_TEXTS[kind]}' must be a string.")
    return _part(kind, text)


def _call(item: Json, where: str) -> Json:
    found = {name: _string(item, name, where) for name in ("call_id", "name")}
    return {**found, "arguments": arguments_text(item.get("arguments")), "status": "completed"}


def _call_output(item: Json, where: str) -> Json:
    output = item.get("output")
    if output is None:
        output = ""
    if not isinstance(output, str):
        output = _parts(output, f"{where}.output", "input_text")
    return {"call_id": _string(item, "call_id", where), "output": output, "status": "completed"}


def _reasoning_item(item: Json, where: str) -> Json:
    found: Json = {"summary": _texts(item.get("summary") or [], f"{where}.summary", "summary_text")}
    if item.get("content"):
        found["content"] = _texts(item["content"], f"{where}.content", "reasoning_text")
    sealed = item.get("encrypted_content")
    if sealed is not None:
        if not isinstance(sealed, str) or opened(sealed) is None:
            name = f"{where}.encrypted_content"
            raise bad_request(name, f"'{name}' was not written by this server. Leave the field out.", "invalid_encrypted_content")
        found["encrypted_content"] = sealed
    return found


def _texts(parts: Any, where: str, kind: str) -> list[Json]:
    if not isinstance(parts, list) or len(parts) > limits.MAX_CONTENT_PARTS:
        raise bad_request(where, f"'{where}' must be a list of at most {limits.MAX_CONTENT_PARTS} parts.")
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise bad_request(f"{where}[{index}]", f"'{where}[{index}]' must be an object with a text.")
    return [{"type": kind, "text": part["text"]} for part in parts]


def _reference(_item: Json, _where: str) -> Json:
    return {}


def _string(item: Json, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name}", f"'{where}.{name}' must be a string.")
    return value


def check_tool_types(tools: Sequence[Json] | None, omits_hosted: bool) -> None:
    """Checks that each tool is a function or an omitted hosted tool. The ApiError names the first tool that is neither."""
    for index, tool in enumerate(tools or ()):
        kind = hosted_type(tool)
        if tool.get("type") != "function" and not (kind and omits_hosted):
            named = f" '{kind}'" if kind else ""
            message = f"'tools[{index}].type'{named}: this server supports functions only, no hosted or custom tools."
            raise bad_request(f"tools[{index}].type", message, "unsupported_parameter")


def sealed(text: str) -> str:
    """Returns the `encrypted_content` of reasoning, which clients send back with a later request.

    The reasoning is encoded in base64 and not encrypted, because the client may read it anyway.
    """
    content = text.encode()
    return _SEAL_MARK + base64.urlsafe_b64encode(_seal_check(content) + content).decode()


def opened(given: str) -> str | None:
    """Returns the reasoning in an `encrypted_content` that sealed() made, or None for any other text."""
    if not given.startswith(_SEAL_MARK):
        return None
    try:
        found = base64.urlsafe_b64decode(given.removeprefix(_SEAL_MARK))
        content = found[_SEAL_CHECK_BYTES:]
        return content.decode() if found[:_SEAL_CHECK_BYTES] == _seal_check(content) else None
    except ValueError:  # not ASCII, not base64, or decoded bytes that are not UTF-8
        return None


def _seal_check(content: bytes) -> bytes:
    return blake2b(content, digest_size=_SEAL_CHECK_BYTES).digest()
