"""Translates a body of the chat completions API into a ChatRequest. An ApiError names the invalid element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rootstock_llm.services.gateway.api import known_fields
from rootstock_llm.services.gateway.api.chat import ChatRequest, check_size, switches_of, template_variables
from rootstock_llm.services.gateway.api.constraints import constraint_of
from rootstock_llm.services.gateway.api.known_fields import WEB_SEARCH, hosted_type, omitted_names, unserved
from rootstock_llm.services.gateway.api.openai.types import ChatCompletionRequest, check_stream_options, include_stop, parse
from rootstock_llm.services.gateway.api.request_body import joined_salt, session_turn
from rootstock_llm.services.gateway.api.tools import NO_TOOLS, Functions, ToolChoice, ToolUse, check_num_tools, tool_specs
from rootstock_llm.services.gateway.generation import body_fields
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import check_chars
from rootstock_llm.services.shared import limits

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_MAY_BE_EMPTY = ("assistant", "tool", "function")  # roles of messages whose content may be null or absent


def chat_request(body: dict[str, Any], origin: Origin, omits_hosted: bool) -> ChatRequest:
    """Translates a body into a ChatRequest. Raises ApiError.

    Records in `origin` the names of omitted hosted tools, whether the response is streamed, and the request id of the client.

    Args:
        omits_hosted: Whether hosted tools are omitted. If not, a request with hosted tools is refused.
    """
    if omits_hosted and body.get(WEB_SEARCH) is not None:
        origin.omit([WEB_SEARCH])
        body = {**body, WEB_SEARCH: None}
    request = parse(ChatCompletionRequest, body, known_fields.CHAT, origin)
    use, tools = _tool_use(request, omits_hosted), request.tools or []
    if omits_hosted and (omitted := omitted_names(tools)):
        origin.omit(omitted)
        tools = [tool for tool in tools if not hosted_type(tool)]
    if request.stream:
        origin.stream()
    _check_messages(request.messages)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise bad_request("continue_final_message", "'continue_final_message' and 'add_generation_prompt' cannot both be true.")
    switches, names = switches_of(request), body_fields.CHAT
    given, effort = request.chat_template_kwargs, request.reasoning_effort
    variables = template_variables(names, given, effort, switches, request.documents)
    prediction = _predicted_text(request.prediction)
    _check_logprobs(request)
    if (name := request.request_name) is not None:
        origin.name(name)
    return ChatRequest(
        fields=names,
        model=request.model,
        messages=request.messages,
        tools=() if request.tool_choice == "none" else tools,
        variables=variables,
        read_variables=[*switches, *(["documents"] if request.documents else [])],
        generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continues=continues,
        tool_use=use,
        separates_reasoning=request.separate_reasoning is not False,
        constraint=constraint_of(request),
        prediction=prediction,
        sampling=request.model_copy(update={"messages": (), "prediction": None}),  # messages may have 64 MiB
        min_tokens=request.min_tokens,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        seed=request.seed,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        logprob_token_ids=request.logprob_token_ids or (),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        include_stop=include_stop(request),
        answer=request.shown(),
        name=name or "",
        cache_salt=joined_salt(request.cache_salt, request.extra_key),
        priority=request.priority,
        routing_key=request.routing_key or "",
        session=session_turn(request.session_params),
    )


def parameters_of(tools: Sequence[Any]) -> Mapping[str, Mapping[str, Any] | None]:
    """Returns the JSON schema of each function's parameters, by the function's name. Raises ApiError for invalid tools."""
    check_num_tools(tools)
    return {spec.name: spec.parameters for spec in tool_specs(_functions(tools, False))}


def _tool_use(request: ChatCompletionRequest, omits_hosted: bool) -> ToolUse:
    tools, choice, parallel = request.tools or (), request.tool_choice, request.parallel_tool_calls is not False
    if not tools and choice in (None, "auto", "none"):
        return NO_TOOLS if parallel else ToolUse(parallel=False)
    check_num_tools(tools)
    hosted = [tool for tool in tools if omits_hosted and hosted_type(tool)]
    chooser = ToolChoice(tool_specs(_functions(tools, omits_hosted)), hosted, parallel, function_member="function")
    if not isinstance(choice, dict):
        return chooser.mode(choice)
    if choice.get("type") == "function":
        return chooser.function(choice)
    if choice.get("type") == "allowed_tools":
        return chooser.allowed(choice.get("allowed_tools"), "tool_choice.allowed_tools")
    raise chooser.unknown(choice)


def _functions(tools: Sequence[Any], omits_hosted: bool) -> Functions:
    """Yields the functions among the tools. Raises ApiError for a tool that is neither a function nor an omitted hosted tool."""
    for index, tool in enumerate(tools):
        if omits_hosted and hosted_type(tool):
            continue
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise bad_request(where, f"'{where}' must be an object.")
        if (tool.get("type") or "function") != "function":
            message = f"'{where}.type': this server supports only tools of type 'function'."
            raise bad_request(f"{where}.type", message, "unsupported_parameter")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise bad_request(f"{where}.function", f"'{where}.function' must be an object.")
        yield f"{where}.function", function


def _check_logprobs(request: ChatCompletionRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", "'top_logprobs' requires 'logprobs' to be true.")
    check_stream_options(request)
    if request.logprob_token_ids and not request.logprobs:
        raise bad_request("logprob_token_ids", "'logprob_token_ids' requires 'logprobs'.")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages", "'messages' must be a list with at least one message.")
    if len(messages) > limits.MAX_CHAT_MESSAGES:
        raise bad_request("messages", f"'messages' may have at most {limits.MAX_CHAT_MESSAGES} messages.")
    parts = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        parts += _part_count(message, where)
        if parts > limits.MAX_REQUEST_CONTENT_PARTS:
            raise bad_request("messages", f"'messages' may have at most {limits.MAX_REQUEST_CONTENT_PARTS} content parts in all.")
        _check_message(message, where)
    check_size(messages, body_fields.CHAT)


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
            _check_part(part, f"{where}.content[{index}]")
    elif not isinstance(content, str):
        raise bad_request(f"{where}.content", f"'{where}.content' must be a string or a list of content parts.")


def _check_part(part: Any, where: str) -> None:
    """Checks that a content part is text. Raises ApiError."""
    if not isinstance(part, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    if part.get("type") != "text":
        raise bad_request(
            f"{where}.type", f"'{where}.type': this server supports only content parts of type 'text'.", "unsupported_parameter"
        )
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text", f"'{where}.text' must be a string.")


def _predicted_text(prediction: Any) -> str | None:
    """Returns the text that the client predicts, or None without a prediction. Raises ApiError."""
    if prediction is None:
        return None
    if not isinstance(prediction, dict):
        raise bad_request("prediction", "'prediction' must be an object.")
    if prediction.get("type") != "content":
        raise bad_request("prediction.type", "'prediction.type' must be 'content'.")
    text = _text_of(prediction.get("content"))
    check_chars(len(text), "prediction")
    return text


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("prediction.content", "'prediction.content' must be a string or a list of content parts.")
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise bad_request("prediction.content", f"'prediction.content' may have at most {limits.MAX_CONTENT_PARTS} parts.")
    for index, part in enumerate(content):
        _check_part(part, f"prediction.content[{index}]")
    return "".join(part["text"] for part in content)
