"""A chat request's messages → the call that has the tokenizer render them. Pure; raises ApiError that names the exact element."""

from __future__ import annotations

from typing import Any

from rootstock.v1 import tokenizer_pb2
from services.gateway.api.known_fields import unserved
from services.gateway.api.openai.types import ChatCompletionRequest
from services.gateway.api.request_body import ThinkingSwitch
from services.gateway.api.strict_json import dump_json
from services.gateway.request.budgets import check_chars
from services.gateway.request.errors import bad_request
from services.shared import limits

_THINKING_OFF = {"enable_thinking": False, "thinking": False}
_SWITCHES = ("enable_thinking", "thinking", "think")
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_MAY_BE_EMPTY = ("assistant", "tool", "function")  # roles whose content may be null or absent


def chat_call(request: ChatCompletionRequest, request_id: str) -> tokenizer_pb2.EncodeChatRequest:
    """The tokenizer's call for checked messages. Raises ApiError."""
    _check_messages(request.messages)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise bad_request("continue_final_message", "'continue_final_message' and 'add_generation_prompt' exclude each other.")
    generation_prompt = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    switches = _switches(request)
    kwargs = _template_variables(request, switches)
    return tokenizer_pb2.EncodeChatRequest(
        request_id=request_id,
        messages_json=dump_json(request.messages, "messages"),
        tools_json=dump_json(request.tools, "tools") if request.tools and request.tool_choice != "none" else b"",
        template_kwargs_json=dump_json(kwargs, "chat_template_kwargs") if kwargs else b"",
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        read_variables=[*switches, *(["documents"] if request.documents else [])],
    )


def _switches(request: ChatCompletionRequest) -> dict[str, Any]:
    """Returns the fields that switch reasoning, as the template's variables: an object {"type"} becomes true or false."""
    return {
        name: value.type != "disabled" if isinstance(value, ThinkingSwitch) else value
        for name in _SWITCHES
        if (value := getattr(request, name)) is not None
    }


def _template_variables(request: ChatCompletionRequest, switches: dict[str, Any]) -> dict[str, Any]:
    """The client's own go before what other fields come to. Effort `none` is what templates with a switch call thinking off, as
    in SGLang."""
    given, effort = request.chat_template_kwargs or {}, request.reasoning_effort
    if effort is None:
        own: dict[str, Any] = {}
    elif given.get("reasoning_effort", effort) != effort:
        raise bad_request("reasoning_effort", "'reasoning_effort' and 'chat_template_kwargs' say different things.")
    else:
        own = {"reasoning_effort": effort, **(_THINKING_OFF if effort == "none" else {})}
    for name, value in switches.items():
        if given.get(name, value) != value:
            raise bad_request(name, f"'{name}' and 'chat_template_kwargs' set '{name}' to different values. Send one value.")
    if request.documents:
        own["documents"] = request.documents
    return {**own, **switches, **given}


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages", "'messages' must be a list with at least one message.")
    if len(messages) > limits.MAX_CHAT_MESSAGES:
        raise bad_request("messages", f"'messages' may have at most {limits.MAX_CHAT_MESSAGES} messages.")
    parts = chars = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        parts += _part_count(message, where)
        if parts > limits.MAX_REQUEST_CONTENT_PARTS:
            raise bad_request("messages", f"'messages' may have at most {limits.MAX_REQUEST_CONTENT_PARTS} content parts in all.")
        _check_message(message, where)
        chars += _num_chars(message.get("content"))
    check_chars(chars, "messages")


def _num_chars(content: Any) -> int:
    return sum(len(part["text"]) for part in content) if isinstance(content, list) else len(content or "")


def _part_count(message: Any, where: str) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return 0
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise bad_request(f"{where}.content", f"'{where}.content' may have at most {limits.MAX_CONTENT_PARTS} parts.")
    return len(content)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    if not isinstance(message.get("role"), str) or message["role"] not in _ROLES:
        raise bad_request(f"{where}.role", f"'{where}.role' must be one of {', '.join(sorted(_ROLES))}.")
    if message.get("audio"):
        raise unserved(f"{where}.audio")
    content = message.get("content")
    if content is None:
        if message["role"] not in _MAY_BE_EMPTY:
            raise bad_request(f"{where}.content", f"'{where}.content' is required.")
    elif isinstance(content, list):
        for index, part in enumerate(content):
            check_part(part, f"{where}.content[{index}]")
    elif not isinstance(content, str):
        raise bad_request(f"{where}.content", f"'{where}.content' must be a string or a list of content parts.")


def check_part(part: Any, where: str) -> None:
    """Of text, the only sort there is. Raises ApiError."""
    if not isinstance(part, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    if part.get("type") != "text":
        raise bad_request(f"{where}.type", "Only content parts of type 'text' are supported.", "unsupported_parameter")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text", f"'{where}.text' must be a string.")
