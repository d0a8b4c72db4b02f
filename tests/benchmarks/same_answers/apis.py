"""Request bodies of the routes that generate. The same prompt, limit or tool has a different field name on each route."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GENERATE = "/v1/responses", "/generate"
PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE)
CHATS = (CHAT, MESSAGES, RESPONSES)
MODEL = "demo"


def body_of(path: str, prompt: str, num_tokens: int, **sampling: Any) -> Json:
    """Returns a request for one prompt.

    Args:
        path: Route, one of PATHS.
        prompt: Prompt text; on routes with messages, it becomes the user's message.
        num_tokens: Limit of output tokens.
        sampling: Sampling parameters by the route's field names. Without a temperature, the request is greedy.
    """
    sampling = {"temperature": 0, **sampling}
    messages = [{"role": "user", "content": prompt}]
    bodies: dict[str, Json] = {
        CHAT: {"model": MODEL, "messages": messages, "max_tokens": num_tokens, "return_token_ids": True, **sampling},
        COMPLETIONS: {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "return_token_ids": True, **sampling},
        MESSAGES: {"model": MODEL, "messages": messages, "max_tokens": num_tokens, **sampling},
        RESPONSES: {"model": MODEL, "input": prompt, "max_output_tokens": num_tokens, "store": False, **sampling},
        GENERATE: {"text": prompt, "sampling_params": {"max_new_tokens": num_tokens, **sampling}},
    }
    return bodies[path]


def streamed(path: str, body: Json) -> Json:
    """Returns the request with a streamed response. On routes that send usage only on request, asks for usage."""
    options = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    return {**body, **options, "stream": True}


def tool_of(path: str, name: str, description: str, parameter: str) -> Json:
    """Returns a tool with one string parameter."""
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": description}
    if path == CHAT:
        return {"type": "function", "function": {**function, "parameters": schema}}
    return {**function, "input_schema": schema} if path == MESSAGES else {"type": "function", **function, "parameters": schema}
