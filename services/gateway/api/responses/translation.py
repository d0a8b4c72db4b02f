"""Translates a request of the Responses API, with the items that precede its output, into a ChatRequest.

Pure. An ApiError names the invalid element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from rootstock_llm.services.gateway.api import known_fields
from rootstock_llm.services.gateway.api.chat import ChatRequest, Tool, check_size, switches_of, template_variables
from rootstock_llm.services.gateway.api.constraints import Named, named_schema, response_format
from rootstock_llm.services.gateway.api.known_fields import KnownFields, hosted_type, omitted_names, refuse_unserved
from rootstock_llm.services.gateway.api.request_body import joined_salt, of_validation
from rootstock_llm.services.gateway.api.responses.items import check_tool_types, messages_of
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.api.tools import ToolChoice, ToolUse, tool_specs
from rootstock_llm.services.gateway.generation.body_fields import RESPONSES
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.gateway.store.metadata import check_metadata

Json = dict[str, Any]

KNOWN = KnownFields(
    frozenset(
        (
            *("access_programs", "max_messages", "moderation", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "service_tier", "user"),
        )
    ),
    {
        **known_fields.of_chats_alone(ResponsesRequest.model_fields),
        **known_fields.SAMPLING,
        **known_fields.OF_OTHERS,
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
        "reasoning_effort": (),
        "background_options": ({},),
        "context_management": ([],),
        "image": ({},),
        "lora_path": ("",),
        "modalities": ([], ["text"]),
        "n": (1,),
        "prompt": (),
    },
)
_FORMAT = "text.format"


def parse(body: Json, omits_hosted: bool) -> ResponsesRequest:
    """Returns the validated body. Raises ApiError. Checks that need stored items follow later.

    Args:
        omits_hosted: Whether hosted tools are accepted. If so, the functions of this module omit them.
    """
    refuse_unserved(body, KNOWN)
    try:
        request = ResponsesRequest.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from None
    if request.previous_response_id is not None and request.conversation is not None:
        raise bad_request("conversation", "'conversation' and 'previous_response_id' cannot be combined. Send only one.")
    check_metadata(request.metadata)
    check_tool_types(request.tools, omits_hosted)
    return request


def as_served(request: ResponsesRequest) -> ResponsesRequest:
    """Returns the request without its hosted tools. The response and its stored record show the returned request."""
    if not omitted_names(request.tools):
        return request
    choice = request.tool_choice
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
        allowed = [tool for tool in choice["tools"] if not hosted_type(tool)]
        choice = {**choice, "tools": allowed} if allowed else "none"
    tools = [tool for tool in request.tools or () if not hosted_type(tool)]
    return request.model_copy(update={"tools": tools, "tool_choice": choice})


def chat_request(request: ResponsesRequest, items: Sequence[Json], streams: bool) -> ChatRequest:
    """Translates a request for a response into a ChatRequest. Raises ApiError.

    Args:
        items: All items before the output: the stored items of the context, then the items of the request.
        streams: Whether the output is sent while it is generated.
    """
    return replace(
        prompt_request(request, items),
        constraint=_constraint(request),
        sampling=request.model_copy(update={"input": None, "tools": None}),
        max_tokens=request.max_output_tokens,
        seed=request.seed,
        logprobs=(request.top_logprobs or 0) if wants_logprobs(request) else None,
        stream=streams,
        include_stop=bool(request.no_stop_trim),
        cache_salt=joined_salt(request.cache_salt, request.extra_key),
        priority=request.priority,
        routing_key=request.routing_key or "",
    )


def prompt_request(request: ResponsesRequest, items: Sequence[Json]) -> ChatRequest:
    """Returns a ChatRequest with only the fields on which the prompt and its tool calls depend. Raises ApiError."""
    messages = messages_of(items)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise bad_request("input", "'input' is required.", "missing_required_parameter")
    use = _tool_use(request)
    check_size(messages, RESPONSES)
    switches, effort = switches_of(request), None if request.reasoning is None else request.reasoning.effort
    functions = [tool for tool in request.tools or () if not hosted_type(tool)]
    return ChatRequest(
        fields=RESPONSES,
        model=request.model,
        messages=messages,
        tools=() if request.tool_choice == "none" else [_tool(tool) for tool in functions],
        variables=template_variables(RESPONSES, request.chat_template_kwargs, effort, switches),
        read_variables=list(switches),
        tool_use=use,
    )


def wants_logprobs(request: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (request.include or ())


def _tool(tool: Mapping[str, Any]) -> Tool:
    """Returns the function in the form that chat templates read."""
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_use(request: ResponsesRequest) -> ToolUse:
    """Returns the tool calls that `tools` and `tool_choice` allow or require in the output.

    Raises ApiError if `tools` or `tool_choice` is invalid.
    """
    tools, choice, parallel = request.tools or (), request.tool_choice, request.parallel_tool_calls is not False
    _check_choice(choice)
    if not tools and choice in (None, "auto", "none"):
        return ToolUse(parallel=parallel)
    functions = ((f"tools[{index}]", tool) for index, tool in enumerate(tools) if not hosted_type(tool))
    chooser = ToolChoice(tool_specs(functions), [tool for tool in tools if hosted_type(tool)], parallel)
    if not isinstance(choice, dict):
        return chooser.mode(choice)
    if choice.get("type") == "function":
        return chooser.function(choice)
    if choice.get("type") == "allowed_tools":
        return chooser.allowed(choice, "tool_choice")
    raise chooser.unknown(choice)


def _check_choice(choice: Any) -> None:
    """Checks the type of a tool choice, and the types of the tools in its list of allowed tools. Raises ApiError."""
    if not isinstance(choice, dict) or choice.get("type") == "function" or hosted_type(choice) not in ("", "allowed_tools"):
        return
    if choice.get("type") != "allowed_tools":
        message = "'tool_choice' must be none, auto, required, a function or allowed_tools."
        raise bad_request("tool_choice", message, "unsupported_parameter")
    if not isinstance(choice.get("tools"), list):
        raise bad_request("tool_choice.tools", "'tool_choice.tools' must be a list.")
    for tool in choice["tools"]:
        _check_choice(tool)


def _constraint(request: ResponsesRequest) -> Named | None:
    given = None if request.text is None else request.text.format
    if given is None:
        return None
    if given.get("type") != "json_schema":
        return response_format(given, _FORMAT)
    return _FORMAT, named_schema(given, _FORMAT)
