"""Turns the prompts of all APIs into token ids and checks their lengths. The tokenizer service encodes texts.

All errors are ApiError. The argument `param` or `where` of a function is the client's field that errors name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rootstock_llm.protos import tokenizer_pb2
from rootstock_llm.services.gateway.api.generation_params import check_token_ids
from rootstock_llm.services.gateway.generation.body_fields import FieldNames
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request, context_length_exceeded, internal
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import ModelInfo, PromptInput, check_chars
from rootstock_llm.services.gateway.generation.trace import EncodeCall
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS, HASH_BYTES


@dataclass(frozen=True, slots=True)
class ContextBudget:
    """The maximum number of tokens of a prompt, and the choice between cutting and refusing a longer prompt."""

    context_len: int  # tokens of the model's context
    output_tokens: int  # tokens of the context that are reserved for the output
    cuts: bool  # whether a longer prompt is cut to its first tokens; otherwise it is refused

    @property
    def most(self) -> int:
        """Largest number of tokens that a prompt may have."""
        return self.context_len - self.output_tokens

    def bound(self, call: EncodeCall) -> None:
        """Writes the maximum number of prompt tokens into the call. The tokenizer then stops encoding at this number."""
        call.max_tokens, call.cuts = max(self.most, 0), self.cuts

    def check(self, tokens: int, param: str, is_bound: bool = False) -> None:
        """Checks the length of a prompt.

        Args:
            is_bound: Whether `tokens` is only a lower bound of the length.

        Raises:
            ApiError: The prompt is empty, or it is too long and may not be cut.
        """
        if tokens == 0:
            raise bad_request(param, "The prompt has no tokens.")
        if tokens <= self.most or (self.cuts and self.most > 0):
            return
        count = f"at least {tokens}" if is_bound else str(tokens)
        if self.output_tokens:
            raise context_length_exceeded(param, self.context_len, count)
        message = f"This model's maximum context length is {self.context_len} tokens, and the input has {count}."
        raise bad_request(param, message, "context_length_exceeded")

    def fit(self, prompt: PromptInput, param: str) -> PromptInput:
        """Returns the prompt, cut to its first tokens if it is too long. Raises ApiError as check() does.

        A cut prompt has no text, because `echo` must return the text of the remaining tokens.
        """
        tokens, most = prompt.at_least or len(prompt.ids), self.most
        self.check(tokens, param, prompt.at_least > 0)
        if tokens <= most:
            return prompt
        ids = tokenizer_pb2.TokenIds(ids=prompt.ids[:most]).ids
        hashes = prompt.block_hashes[: most // BLOCK_TOKENS * HASH_BYTES]
        return replace(prompt, ids=ids, text=None, block_hashes=hashes, num_cut=tokens - most, at_least=0)


UNBOUNDED = ContextBudget((1 << 31) - 1, 0, False)  # for prompts that are only tokenized, or cut after their tokenization


def budget_with_output(model: ModelInfo, in_session: bool = False) -> ContextBudget:
    """Returns the budget of a prompt that output follows. One token of the context is reserved for the output.

    A turn of a session is never cut, because only the worker knows the length of the session's context.
    """
    return ContextBudget(model.context_len, 1, model.auto_truncates and not in_session)


def budget_without_output(model: ModelInfo) -> ContextBudget:
    """Returns the budget of a prompt without output tokens, such as for an embedding. The prompt may fill the context."""
    return ContextBudget(model.context_len, 0, model.auto_truncates)


async def of_chat(
    call: tokenizer_pb2.EncodeChatRequest,
    tokenizer: TokenizerClient,
    model: ModelInfo,
    origin: Origin,
    budget: ContextBudget,
    fields: FieldNames,
) -> PromptInput:
    """Returns the prompt of a chat, which the tokenizer renders and encodes."""
    budget.bound(call)
    with origin.tokenizing(call):
        response = await tokenizer.encode_chat(call, model.source, fields)
    if len(response.prompts) != 1:
        raise internal("The tokenizer did not return exactly one prompt for a chat.")
    found = response.prompts[0]
    prompt = PromptInput(found.ids, None, found.block_hashes, at_least=found.at_least, rendered_end=response.rendered_end)
    return budget.fit(prompt, fields.of("messages"))


async def of_prediction(text: str, tokenizer: TokenizerClient, model: ModelInfo, origin: Origin) -> Sequence[int]:
    """Returns the token ids of the output that the client predicts, at most MAX_PREDICTION_TOKENS.

    Ids outside the model's vocabulary are left out, because a tokenizer may have more tokens than the model.
    """
    if not text:
        return ()
    most = min(limits.MAX_PREDICTION_TOKENS, model.context_len)
    call = tokenizer_pb2.EncodeRequest(
        request_id=origin.request_id, texts=[text], add_special_tokens=False, max_tokens=most, cuts=True
    )
    with origin.tokenizing(call):
        response = await tokenizer.encode(call, "prediction", model.source)
    if len(response.prompts) != 1:
        raise internal("The tokenizer did not return exactly one list of token ids for the predicted output.")
    known = [token for token in response.prompts[0].ids[:most] if token < model.vocab_size]
    ids: Sequence[int] = tokenizer_pb2.TokenIds(ids=known).ids
    return ids


def _prompt(found: tokenizer_pb2.TokenIds, text: str | None) -> PromptInput:
    return PromptInput(found.ids, text, found.block_hashes, at_least=found.at_least)


async def of_completion(
    prompt: Any,
    model: ModelInfo,
    tokenizer: TokenizerClient,
    origin: Origin,
    param: str,
    budget: ContextBudget,
    hash_root: bytes,
    add_special_tokens: bool = True,
) -> list[PromptInput]:
    """Returns the prompts of a field that is a string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(prompt, list) and prompt and type(prompt[0]) in (int, list):
        return await _of_ids_or_lists(prompt, model, param, budget)
    call = tokenizer_pb2.EncodeRequest(
        request_id=origin.request_id,
        texts=_texts(prompt, param),
        hash_root=hash_root,
        add_special_tokens=add_special_tokens,
    )
    return [budget.fit(item, param) for item in await of_texts(call, tokenizer, param, model, origin, budget)]


def _texts(prompt: Any, param: str) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_form(param)
    if not isinstance(prompt[0], str):
        raise _wrong_form(param)
    _check_count(prompt, param)
    if not all(isinstance(item, str) for item in prompt):
        raise bad_request(param, f"'{param}' must have strings only, or token ids only.")
    return prompt


def _check_count(prompts: list[Any], param: str) -> None:
    if len(prompts) > limits.MAX_BATCH_PROMPTS:
        raise bad_request(param, f"'{param}' may have at most {limits.MAX_BATCH_PROMPTS} prompts.")


async def _of_ids_or_lists(prompt: list[Any], model: ModelInfo, param: str, budget: ContextBudget) -> list[PromptInput]:
    if isinstance(prompt[0], int):
        budget.check(len(prompt), param)
        return [budget.fit(of_ids(prompt, model.vocab_size, param), param)]
    _check_count(prompt, param)
    for ids in prompt:
        if not isinstance(ids, list):
            raise _wrong_form(param)
        budget.check(len(ids), param)
    where = [f"{param}[{index}]" for index in range(len(prompt))]
    return [budget.fit(await of_many_ids(ids, model.vocab_size, at), param) for ids, at in zip(prompt, where, strict=True)]


def _wrong_form(param: str) -> ApiError:
    forms = "a string, a list of strings, a list of token ids or a list of such lists"
    return bad_request(param, f"'{param}' must be {forms}.")


async def of_many_ids(ids: list[Any], vocab_size: int, where: str) -> PromptInput:
    """Returns the prompt with these ids, after other tasks of the event loop have run. Used in loops over many prompts."""
    await asyncio.sleep(0)
    return of_ids(ids, vocab_size, where)


def of_ids(ids: list[Any], vocab_size: int, where: str) -> PromptInput:
    """Returns the prompt with these ids. Checks their types and range; the caller has checked their number."""
    try:
        packed = tokenizer_pb2.TokenIds(ids=ids).ids  # raises unless all are 32-bit integers; faster than check_token_ids()
    except (TypeError, ValueError):
        check_token_ids(ids, vocab_size, where)
        raise
    if ids and int(np.asarray(packed).max()) >= vocab_size:
        check_token_ids(ids, vocab_size, where)
    return PromptInput(packed, None)


def last_tokens_of(prompt: PromptInput, most: int, param: str) -> PromptInput:
    """Returns the prompt, cut to its last `most` tokens if it is longer. Raises ApiError if `most` is 0."""
    if not most:
        raise bad_request(param, f"'{param}' is 0, which leaves no tokens of the input. Send at least 1.")
    cut = max(len(prompt.ids) - most, 0)
    return replace(prompt, ids=tokenizer_pb2.TokenIds(ids=prompt.ids[-most:]).ids, text=None, num_cut=cut) if cut else prompt


async def of_texts(
    call: tokenizer_pb2.EncodeRequest,
    tokenizer: TokenizerClient,
    param: str,
    model: ModelInfo,
    origin: Origin,
    budget: ContextBudget,
) -> list[PromptInput]:
    """Returns a prompt for each text of the call. The prompts may exceed the budget; ContextBudget.fit() checks them."""
    check_chars(sum(map(len, call.texts)), param)
    budget.bound(call)
    with origin.tokenizing(call):
        response = await tokenizer.encode(call, param, model.source)
    if len(response.prompts) != len(call.texts):
        raise internal("The tokenizer did not return one prompt per text.")
    return [_prompt(ids, text) for ids, text in zip(response.prompts, call.texts, strict=True)]


def named(prompts: Sequence[PromptInput], names: Sequence[str]) -> list[PromptInput]:
    """Returns the prompts with these request ids, which workers receive. "" leaves a prompt unchanged."""
    return [replace(prompt, request_id=name) if name else prompt for prompt, name in zip(prompts, names, strict=True)]
