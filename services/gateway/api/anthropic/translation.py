"""Translates a body of the Messages API into a ChatRequest. Pure. An ApiError names the invalid element."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from rootstock_llm.services.gateway.api import known_fields
from rootstock_llm.services.gateway.api.anthropic.types import CountTokensRequest, MessagesRequest
from rootstock_llm.services.gateway.api.chat import ChatRequest, Tool, check_size, template_variables
from rootstock_llm.services.gateway.api.constraints import json_schema
from rootstock_llm.services.gateway.api.generation_params import stop_strings
from rootstock_llm.services.gateway.api.known_fields import KnownFields, hosted_type, omitted_names, refuse_unserved
from rootstock_llm.services.gateway.api.request_body import SamplingBody, arguments_text, joined_salt, of_validation
from rootstock_llm.services.gateway.api.tools import ToolChoice, ToolUse, check_num_tools, tool_specs
from rootstock_llm.services.gateway.generation.body_fields import MESSAGES
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.shared import limits

Json = dict[str, Any]
B = TypeVar("B", bound=CountTokensRequest)

KNOWN = KnownFields(
    frozenset(
        (
            "cache_control",
            "context_management",  # no context edit is applied, and the response lists no edits
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "user_profile_id",
            "workspace_id",
        )
    ),
    {
        **known_fields.of_chats_alone(MessagesRequest.model_fields),
        **known_fields.SAMPLING,
        **known_fields.OF_OTHERS,
        "add_generation_prompt": (True,),
        "container": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "enable_thinking": (),
        "mcp_servers": ([],),
        "parallel_tool_calls": (True,),
        "reasoning_effort": (),
        "speed": ("standard",),
        "think": (),
    },
)
_THINKS = ("enabled", "adaptive")  # types of `thinking` that turn reasoning on
_FUNCTION = "custom"  # type of a tool that the client runs
# Mode for ToolChoice.mode() by Anthropic's type of tool choice. "tool" has no mode, because it names a function.
_MODES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
_HOSTED_CALLS = frozenset(("server_tool_use", "mcp_tool_use"))  # types of blocks with calls of hosted tools
_HOSTED_RESULT = "_tool_result"  # suffix of the types of blocks with results of hosted tools
_NAME = re.compile("[a-z0-9_]{1,64}")  # an error message repeats a client's type only if it has this form
_FORMAT = "output_config.format"


def parse(model: type[B], body: Json, omit: Callable[[Sequence[str]], None] | None) -> B:
    """Returns the validated body. Raises ApiError.

    Args:
        omit: Called with the names of the hosted tools that the gateway omits. None if it refuses hosted tools.
    """
    refuse_unserved(body, KNOWN)
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from None
    if omit is not None:
        omit(omitted_names([tool for tool in request.tools or () if tool.get("type") != _FUNCTION]))
    return request


def thinks(request: CountTokensRequest) -> bool:
    """Returns whether the client turns the model's reasoning on."""
    return request.thinking is not None and request.thinking.type in _THINKS


def chat_request(request: MessagesRequest, omits_hosted: bool) -> ChatRequest:
    """Translates a request for a message into a ChatRequest. Raises ApiError.

    Args:
        omits_hosted: Whether hosted tools and their calls are removed. If not, a request that has them is refused.
    """
    text_format = _format(request)
    prompt = prompt_request(request, omits_hosted)
    stop = stop_strings(request.stop_sequences or None, "stop_sequences")
    sampling = SamplingBody(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or None, stop=stop or None)
    return replace(
        prompt,
        constraint=None if text_format is None else (_FORMAT, json_schema(_schema(text_format), f"{_FORMAT}.schema")),
        sampling=sampling,
        max_tokens=request.max_tokens,
        stream=bool(request.stream),
        include_stop=False,
        cache_salt=joined_salt(request.cache_salt, request.extra_key),
        priority=request.priority,
        routing_key=request.routing_key or "",
    )


def prompt_request(request: CountTokensRequest, omits_hosted: bool) -> ChatRequest:
    """Returns a ChatRequest with only the fields on which the prompt and its tool calls depend. Raises ApiError."""
    messages = _messages(_without_hosted_calls(request.messages) if omits_hosted else request.messages)
    if request.system is not None and (text := _text(request.system, "system", _without_billing)):
        messages.insert(0, {"role": "system", "content": text})
    use, tools = _tools(request, omits_hosted)
    _format(request)
    check_size(messages, MESSAGES)
    switch = thinks(request)
    given = {"enable_thinking": switch, "thinking": switch, **(request.chat_template_kwargs or {})}
    config, continues = request.output_config, _is_prefill(messages)
    return ChatRequest(
        fields=MESSAGES,
        model=request.model,
        messages=messages,
        tools=tools,
        variables=template_variables(MESSAGES, given, None if config is None else config.effort, {}),
        generation_prompt=not continues,
        continues=continues,
        tool_use=use,
    )


def _format(request: CountTokensRequest) -> Mapping[str, Any] | None:
    """Returns the JSON schema format that the output's text must have, or None for plain text.

    Raises ApiError for other formats.
    """
    config = request.output_config
    text_format = (None if config is None else config.format) or request.output_format
    if text_format is not None and text_format.get("type") != "json_schema":
        raise bad_request(f"{_FORMAT}.type", f"'{_FORMAT}.type' must be json_schema.")
    return text_format


def _schema(text_format: Mapping[str, Any]) -> Any:
    if text_format.get("schema") is None:
        raise bad_request(f"{_FORMAT}.schema", f"'{_FORMAT}.schema' is required.")
    return text_format["schema"]


def _tools(request: CountTokensRequest, omits_hosted: bool) -> tuple[ToolUse, list[Tool]]:
    """Returns the calls that the output may have, and the tools that the chat template writes into the prompt."""
    tools = request.tools or []
    shown = [_tool(tool, f"tools[{index}]", omits_hosted) for index, tool in enumerate(tools)]
    choice, parallel = request.tool_choice, True
    kind: Any = None
    if choice is not None:
        parallel = choice.get("disable_parallel_tool_use") is not True
        kind = choice.get("type")
        if not isinstance(kind, str) or kind not in _MODES:
            raise bad_request("tool_choice.type", "'tool_choice.type' must be auto, any, tool or none.")
    if not tools and kind in (None, "auto", "none"):
        return ToolUse(parallel=parallel), []
    check_num_tools(tools)
    functions = ((f"tools[{index}]", tool) for index, tool in enumerate(tools) if shown[index] is not None)
    hosted = [tool for tool, function in zip(tools, shown, strict=True) if function is None]
    chooser = ToolChoice(tool_specs(functions, "input_schema"), hosted, parallel)
    use = chooser.function(choice) if kind == "tool" else chooser.mode(None if kind is None else _MODES[kind])
    return use, [] if kind == "none" else [function for function in shown if function is not None]


def _tool(tool: Mapping[str, Any], where: str, omits_hosted: bool) -> Tool | None:
    """Returns the tool in the form that chat templates read, or None for a hosted tool that is omitted."""
    kind = tool.get("type")
    if kind not in (None, _FUNCTION):
        if omits_hosted and hosted_type(tool):
            return None
        named = f" '{kind}'" if isinstance(kind, str) and _NAME.fullmatch(kind) else ""
        message = f"'{where}.type'{named}: this server does not support Anthropic's hosted tools. Send custom tools only."
        raise bad_request(f"{where}.type", message, "unsupported_parameter")
    found = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    if tool.get("input_schema") is not None:
        found["parameters"] = tool["input_schema"]
    return {"type": "function", "function": found}


def _messages(given: Any) -> list[Json]:
    if not isinstance(given, list) or not given:
        raise bad_request("messages", "'messages' must be a list with at least one message.")
    if len(given) > limits.MAX_CHAT_MESSAGES:
        raise bad_request("messages", f"'messages' may have at most {limits.MAX_CHAT_MESSAGES} messages.")
    return _joined([each for index, message in enumerate(given) for each in _message(message, f"messages[{index}]")])


def _without_hosted_calls(messages: Any) -> Any:
    """Replaces calls of hosted tools and their results by empty texts.

    The blocks are not removed, because errors name the index of a block in the client's body.
    """
    return [_without_calls(message) for message in messages] if isinstance(messages, list) else messages


def _without_calls(message: Any) -> Any:
    blocks = message.get("content") if isinstance(message, dict) and message.get("role") == "assistant" else None
    if not isinstance(blocks, list):
        return message
    return {**message, "content": [{"type": "text", "text": ""} if _is_hosted_call(block) else block for block in blocks]}


def _is_hosted_call(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and (kind in _HOSTED_CALLS or kind.endswith(_HOSTED_RESULT))


def _joined(messages: Sequence[Json]) -> list[Json]:
    """Joins consecutive user messages, and consecutive assistant messages. Chat templates expect the roles to alternate.

    An assistant message with calls is not joined with the next message.
    """
    groups: list[list[Json]] = []  # messages that become one message; only the last one of a group may have calls
    for message in messages:
        last = groups[-1][-1] if groups else {}
        if message["role"] not in ("user", "assistant") or message["role"] != last.get("role") or "tool_calls" in last:
            groups.append([])
        groups[-1].append(message)
    return [group[0] if len(group) == 1 else _one_message(group) for group in groups]


def _one_message(group: Sequence[Json]) -> Json:
    message: Json = {**group[-1], "content": "\n\n".join(each["content"] for each in group if each["content"])}
    thoughts = [each["reasoning_content"] for each in group if "reasoning_content" in each]
    return {**message, "reasoning_content": "\n\n".join(thoughts)} if thoughts else message


def _message(message: Any, where: str) -> list[Json]:
    if not isinstance(message, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role", f"'{where}.role' must be user, assistant or system.")
    where = f"{where}.content"
    if role == "system":
        return [{"role": "system", "content": _text(content, where)}]
    blocks = _blocks(content, where)
    return [_assistant_message(blocks, where)] if role == "assistant" else _user_messages(blocks, where)


def _blocks(content: Any, where: str) -> Sequence[Json]:
    """Returns the content blocks of a message. A string becomes one text block. Raises ApiError for any other form."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(where, f"'{where}' must be a string or a list of content blocks.")
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise bad_request(where, f"'{where}' may have at most {limits.MAX_CONTENT_PARTS} blocks.")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise bad_request(f"{where}[{index}]", f"'{where}[{index}]' must be an object with a type.")
    return content


def _user_messages(blocks: Sequence[Json], where: str) -> list[Json]:
    """Returns the messages for a user's blocks, in the order of the blocks. Each tool result becomes a message of its own."""
    messages: list[tuple[Json, list[str]]] = []  # each message without its content, and the texts of the content
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block["type"] == "tool_result":
            text = _text(block.get("content") or "", f"{at}.content")
            if block.get("is_error") is True and not text.startswith("Error"):
                text = f"Error: {text}"
            messages.append(({"role": "tool", "tool_call_id": _string(block, "tool_use_id", at)}, [text]))
        elif block["type"] == "text":
            if not messages or messages[-1][0]["role"] != "user":
                messages.append(({"role": "user"}, []))
            messages[-1][1].append(_string(block, "text", at))
        else:
            raise _unserved(block["type"], at)
    return [{**message, "content": "".join(texts)} for message, texts in messages] or [{"role": "user", "content": ""}]


def _assistant_message(blocks: Sequence[Json], where: str) -> Json:
    """Returns one assistant message with the reasoning, the text and the calls of the blocks."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block["type"] == "text":
            texts.append(_string(block, "text", at))
        elif block["type"] == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif block["type"] == "tool_use":
            calls.append(_call(block, at))
        elif block["type"] != "redacted_thinking":
            raise _unserved(block["type"], at)
    message: Json = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _call(block: Json, where: str) -> Json:
    function = {"name": _string(block, "name", where), "arguments": arguments_text(block.get("input"))}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _without_billing(text: str) -> str:
    """Removes the billing line that Claude Code puts before its system prompt.

    The line differs in each request. With it, the prompts of two requests would share no cached prefix.
    """
    return text.partition("\n")[2] if text.startswith("x-anthropic-billing-header:") else text


def _text(content: Any, where: str, edit: Callable[[str], str] = str) -> str:
    """Returns the text of a string or of text blocks, after `edit` has changed the text of each block. Raises ApiError."""
    texts = []
    for index, block in enumerate(_blocks(content, where)):
        if block["type"] != "text":
            raise _unserved(block["type"], f"{where}[{index}]")
        texts.append(edit(_string(block, "text", f"{where}[{index}]")))
    return "".join(texts)


def _string(block: Json, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name}", f"'{where}.{name}' must be a string.")
    return value


def _unserved(kind: str, where: str) -> ApiError:
    named = f" '{kind}'" if _NAME.fullmatch(kind) else ""
    return bad_request(
        f"{where}.type",
        f"'{where}.type'{named}: this server does not support content blocks of this type.",
        "unsupported_parameter",
    )


def _is_prefill(messages: Sequence[Json]) -> bool:
    """Returns whether the output continues the last message, because it is an assistant message without calls."""
    return messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
