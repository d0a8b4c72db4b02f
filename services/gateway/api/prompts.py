"""What a request asks the model to go on from: checked prompts and calls → token ids, by way of the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rootstock.v1 import tokenizer_pb2
from services.gateway.api.room import Room
from services.gateway.api.sampling_fields import check_token_ids
from services.gateway.peers.tokenizer_client import TokenizerClient
from services.gateway.request.budgets import check_chars
from services.gateway.request.errors import ApiError, bad_request, internal
from services.gateway.request.field_names import FieldNames
from services.gateway.request.generation import ModelInfo, Prompt
from services.gateway.request.origin import Origin
from services.shared import limits


async def of_chat(
    call: tokenizer_pb2.EncodeChatRequest,
    tokenizer: TokenizerClient,
    model: ModelInfo,
    origin: Origin,
    room: Room,
    fields: FieldNames,
) -> Prompt:
    """Returns the prompt of a chat. Raises ApiError in the client's names of its fields."""
    room.bound(call)
    with origin.tokenizing(call):
        response = await tokenizer.encode_chat(call, model.source, fields)
    if len(response.prompts) != 1:
        raise internal("The tokenizer answered with the wrong number of prompts.")
    found = response.prompts[0]
    prompt = Prompt(found.ids, None, found.block_hashes, at_least=found.at_least, rendered_end=response.rendered_end)
    return room.fit(prompt, fields.of("messages"))


async def of_prediction(text: str, tokenizer: TokenizerClient, model: ModelInfo, origin: Origin) -> Sequence[int]:
    """Ids of a text that an answer may turn out to be: of a longer one the first, and none that the model has no row for, which
    a tokenizer may know. Raises ApiError."""
    if not text:
        return ()
    most = min(limits.MAX_PREDICTION_TOKENS, model.context_len)
    call = tokenizer_pb2.EncodeRequest(
        request_id=origin.request_id, texts=[text], add_special_tokens=False, max_tokens=most, cuts=True
    )
    with origin.tokenizing(call):
        response = await tokenizer.encode(call, "prediction", model.source)
    if len(response.prompts) != 1:
        raise internal("The tokenizer answered with the wrong number of texts.")
    known = [token for token in response.prompts[0].ids[:most] if token < model.vocab_size]
    ids: Sequence[int] = tokenizer_pb2.TokenIds(ids=known).ids
    return ids


def _prompt(found: tokenizer_pb2.TokenIds, text: str | None) -> Prompt:
    return Prompt(found.ids, text, found.block_hashes, at_least=found.at_least)


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
    return [room.fit(one, param) for one in await of_texts(call, tokenizer, param, model, origin, room)]


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


def of_last(prompt: Prompt, most: int, param: str) -> Prompt:
    """The last `most` tokens. Raises ApiError where there are none."""
    if not most:
        raise bad_request(param, f"'{param}' leaves nothing of the input.")
    cut = max(len(prompt.ids) - most, 0)
    return replace(prompt, ids=tokenizer_pb2.TokenIds(ids=prompt.ids[-most:]).ids, text=None, num_cut=cut) if cut else prompt


async def of_texts(
    call: tokenizer_pb2.EncodeRequest, tokenizer: TokenizerClient, param: str, model: ModelInfo, origin: Origin, room: Room
) -> list[Prompt]:
    """One prompt for each of the call's texts, yet to be fitted. Raises ApiError."""
    check_chars(sum(map(len, call.texts)), param)
    room.bound(call)
    with origin.tokenizing(call):
        response = await tokenizer.encode(call, param, model.source)
    if len(response.prompts) != len(call.texts):
        raise internal("The tokenizer answered with the wrong number of prompts.")
    return [_prompt(one, text) for one, text in zip(response.prompts, call.texts, strict=True)]
