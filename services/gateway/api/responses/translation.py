"""A request of the Responses API, with the items that its model is to see → a chat request. Pure; raises ApiError that names the
client's own field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from services.gateway.api import known_fields
from services.gateway.api.body_errors import of_validation
from services.gateway.api.known_fields import KnownFields, hosted_type, omitted_names, refuse_unserved
from services.gateway.api.request_body import PlacedBody, SamplingBody, ThinkingBody
from services.gateway.api.responses.items import check_tool_types, messages_of
from services.gateway.api.responses.types import ResponsesRequest
from services.gateway.request import client_fields
from services.gateway.request.client_fields import ClientFields
from services.gateway.request.errors import ApiError, bad_request
from services.gateway.request.generation import Generation, Plan
from services.gateway.state.metadata import check_metadata

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
_SAME = ("cache_salt", "chat_template_kwargs", "parallel_tool_calls", "seed", "stream", "tool_choice")
_SHARED = (*SamplingBody.model_fields, *PlacedBody.model_fields)
# A chat's fields, where a message of ours may name them, as this API has them; longer ones first.
_NAMES = (
    (re.compile(r"response_format\.json_schema"), "text.format"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"max_completion_tokens|max_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"(tool_choice(?:\.allowed_tools)?(?:\.tools\[\d+\])?)\.function"), r"\1"),
    (re.compile(r"tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"messages(\[\d+\](\.\w+)*)?"), "input"),
    (re.compile(r"\blogprobs\b"), "include"),
)
_FIELDS = ClientFields({**client_fields.CHAT.names, "prompt_ids": "input", "max_new_tokens": "max_output_tokens"})


def parse(body: Json, omits_hosted: bool) -> ResponsesRequest:
    """What does not need the items of other responses is checked. omits_hosted: hosted tools may be there."""
    refuse_unserved(body, KNOWN)
    try:
        request = ResponsesRequest.model_validate(body)
    except ValidationError as error:
        raise of_validation(error) from None
    if request.previous_response_id is not None and request.conversation is not None:
        raise bad_request("conversation", "'conversation' and 'previous_response_id' exclude each other.")
    check_metadata(request.metadata)
    check_tool_types(request.tools, omits_hosted)
    return request


def as_served(request: ResponsesRequest) -> ResponsesRequest:
    """Returns a request that has been prepared without its hosted tools: as its response shows it, and as it is stored."""
    if not omitted_names(request.tools):
        return request
    choice = request.tool_choice
    if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
        allowed = [tool for tool in choice["tools"] if not hosted_type(tool)]
        choice = {**choice, "tools": allowed} if allowed else "none"
    tools = [tool for tool in request.tools or () if not hosted_type(tool)]
    return request.model_copy(update={"tools": tools, "tool_choice": choice})


def chat_of(request: ResponsesRequest, items: Sequence[Json]) -> Json:
    """items: all that is said before the answer, the request's own last."""
    messages = messages_of(items)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise bad_request("input", "'input' is required.", "missing_required_parameter")
    chat: Json = {"model": request.model, "messages": messages, "tools": [_tool(tool) for tool in request.tools or ()] or None}
    chat |= {name: getattr(request, name) for name in (*_SAME, *_SHARED)}
    chat |= request.model_dump(include=set(ThinkingBody.model_fields))
    chat["tool_choice"] = _choice(request.tool_choice)
    chat["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _format(request.text.format)
    if wants_logprobs(request):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return {name: value for name, value in chat.items() if value is not None}


def wants_logprobs(request: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (request.include or ())


def renamed(error: ApiError) -> ApiError:
    """In the words of this API."""
    message, param = error.message, error.param
    for pattern, name in _NAMES:
        message = pattern.sub(name, message)
        param = None if param is None else pattern.sub(name, param)
    return ApiError(error.status, message, param=param, code=error.code, retry_after_s=error.retry_after_s)


def own_fields(plan: Plan, streams: bool = False) -> Plan:
    """What workers refuse is named as this API names it. streams: its text is wanted as it comes, whatever the body says."""
    parts = [replace(part, generation=_own(part.generation, streams)) for part in plan.parts]
    return Plan(plan.model, parts)


def _own(generation: Generation, streams: bool) -> Generation:
    return replace(generation, fields=_FIELDS, stream=generation.stream or streams, reworded=renamed)


def _tool(tool: Mapping[str, Any]) -> Json:
    if hosted_type(tool):
        return dict(tool)  # it keeps its index, which errors name
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise bad_request("tool_choice.tools", "'tool_choice.tools' must be a list.")
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": [_choice(each) for each in tools]},
        }
    if hosted_type(choice):
        return choice
    raise bad_request(
        "tool_choice", "'tool_choice' must be none, auto, required, a function or allowed_tools.", "unsupported_parameter"
    )


def _format(given: Mapping[str, Any]) -> Json:
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
