"""What a request asks the model to go on from: checked messages and prompts → token ids, by way of the tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from rootstock.v1 import tokenizer_pb2
from services.gateway.api.known_fields import unserved
from services.gateway.api.openai.types import ChatCompletionRequest
from services.gateway.api.openai.validation import dump_json
from services.gateway.api.room import Room
from services.gateway.api.sampling_fields import check_token_ids
from services.gateway.peers.tokenizer_client import TokenizerClient
from services.gateway.request.errors import ApiError, bad_request, internal
from services.gateway.request.generation import ModelInfo, Prompt
from services.gateway.request.origin import Origin
from services.shared import limits

_THINKING_OFF = {"enable_thinking": False, "thinking": False}
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))


async def of_chat(call: tokenizer_pb2.EncodeChatRequest, tokenizer: TokenizerClient, model: ModelInfo, origin: Origin) -> Prompt:
    with origin.tokenizing(call):
        response = await tokenizer.encode_chat(call, model.source)
    if len(response.prompts) != 1:
        raise internal("The tokenizer answered with the wrong number of prompts.")
    return Prompt(response.prompts[0].ids, None, response.prompts[0].block_hashes)


def chat_call(request: ChatCompletionRequest, request_id: str) -> tokenizer_pb2.EncodeChatRequest:
    """The tokenizer's call for checked messages. Raises ApiError."""
    _check_messages(request.messages)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise bad_request("continue_final_message", "'continue_final_message' and 'add_generation_prompt' exclude each other.")
    generation_prompt = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    kwargs = _template_variables(request)
    return tokenizer_pb2.EncodeChatRequest(
        request_id=request_id,
        messages_json=dump_json(request.messages, "messages"),
        tools_json=dump_json(request.tools, "tools") if request.tools and request.tool_choice != "none" else b"",
        template_kwargs_json=dump_json(kwargs, "chat_template_kwargs") if kwargs else b"",
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
    )


def _template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """The client's own go before what other fields come to. Effort `none` is what templates with a switch call thinking off, as
    in SGLang."""
    given, effort = request.chat_template_kwargs or {}, request.reasoning_effort
    if effort is None:
        own: dict[str, Any] = {}
    elif given.get("reasoning_effort", effort) != effort:
        raise bad_request("reasoning_effort", "'reasoning_effort' and 'chat_template_kwargs' say different things.")
    else:
        own = {"reasoning_effort": effort, **(_THINKING_OFF if effort == "none" else {})}
    if request.documents:
        own["documents"] = request.documents
    return {**own, **given}


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
    if message.get("audio") is not None:
        raise unserved(f"{where}.audio")
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            raise bad_request(f"{where}.content", f"'{where}.content' is required.")
    elif isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{where}.content[{index}]")
    elif not isinstance(content, str):
        raise bad_request(f"{where}.content", f"'{where}.content' must be a string or a list of content parts.")


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    if part.get("type") != "text":
        raise bad_request(f"{where}.type", "Only content parts of type 'text' are supported.", "unsupported_parameter")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text", f"'{where}.text' must be a string.")


async def of_completion(
    prompt: Any,
    model: ModelInfo,
    tokenizer: TokenizerClient,
    origin: Origin,
    param: str,
    room: Room,
    hash_root: bytes,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """`prompt` in any of OpenAI's four forms, checked; `param` is the client's name for it. Raises ApiError."""
    if isinstance(prompt, list) and prompt and type(prompt[0]) in (int, list):
        return await _of_ids_or_lists(prompt, model, param, room)
    call = tokenizer_pb2.EncodeRequest(
        request_id=origin.request_id,
        texts=_texts(prompt, param),
        hash_root=hash_root,
        add_special_tokens=add_special_tokens,
    )
    return [room.fit(one, param) for one in await of_texts(call, tokenizer, param, model, origin)]


def _texts(prompt: Any, param: str) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_form(param)
    if not isinstance(prompt[0], str):
        raise _wrong_form(param)
    _check_count(prompt, param)
    if not all(isinstance(item, str) for item in prompt):
        raise bad_request(param, f"'{param}' must hold strings only, or token ids only.")
    return prompt


def _check_count(prompts: list[Any], param: str) -> None:
    if len(prompts) > limits.MAX_BATCH_PROMPTS:
        raise bad_request(param, f"'{param}' may have at most {limits.MAX_BATCH_PROMPTS} prompts.")


async def _of_ids_or_lists(prompt: list[Any], model: ModelInfo, param: str, room: Room) -> list[Prompt]:
    if isinstance(prompt[0], int):
        room.check(len(prompt), param)
        return [room.fit(of_ids(prompt, model.vocab_size, param), param)]
    _check_count(prompt, param)
    for ids in prompt:
        if not isinstance(ids, list):
            raise _wrong_form(param)
        room.check(len(ids), param)
    where = [f"{param}[{index}]" for index in range(len(prompt))]
    return [room.fit(await of_many_ids(ids, model.vocab_size, at), param) for ids, at in zip(prompt, where, strict=True)]


def _wrong_form(param: str) -> ApiError:
    forms = "a string, a list of strings, a list of token ids or a list of such lists"
    return bad_request(param, f"'{param}' must be {forms}.")


async def of_many_ids(ids: list[Any], vocab_size: int, where: str) -> Prompt:
    """Others have their turn on the event loop before. Raises ApiError."""
    await asyncio.sleep(0)
    return of_ids(ids, vocab_size, where)


def of_ids(ids: list[Any], vocab_size: int, where: str) -> Prompt:
    """Ids whose number has been checked. Raises ApiError."""
    try:
        packed = tokenizer_pb2.TokenIds(ids=ids).ids  # takes nothing but integers of 32 bits, at a fraction of a check's cost
    except (TypeError, ValueError):
        check_token_ids(ids, vocab_size, where)
        raise
    if ids and int(np.asarray(packed).max()) >= vocab_size:
        check_token_ids(ids, vocab_size, where)
    return Prompt(packed, None)


async def of_texts(
    call: tokenizer_pb2.EncodeRequest, tokenizer: TokenizerClient, param: str, model: ModelInfo, origin: Origin
) -> list[Prompt]:
    """One prompt for each of the call's texts. Raises ApiError."""
    with origin.tokenizing(call):
        response = await tokenizer.encode(call, param, model.source)
    if len(response.prompts) != len(call.texts):
        raise internal("The tokenizer answered with the wrong number of prompts.")
    return [Prompt(one.ids, text, one.block_hashes) for one, text in zip(response.prompts, call.texts, strict=True)]
