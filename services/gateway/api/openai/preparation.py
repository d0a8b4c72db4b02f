"""Prepares requests of OpenAI's endpoints: checks the body, has the tokenizer encode the prompts, and checks their lengths.

A preparation calls no worker, so cancelling it needs no cleanup. Error messages never repeat a value that the client sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.api import known_fields, prompts
from rootstock_llm.services.gateway.api.chat import ChatPreparer
from rootstock_llm.services.gateway.api.constraints import constraint_of
from rootstock_llm.services.gateway.api.generation_params import check_token_ids, embedding_generation, generation_of
from rootstock_llm.services.gateway.api.openai.chat import chat_request
from rootstock_llm.services.gateway.api.openai.types import (
    CompletionRequest,
    EmbeddingRequest,
    NamedBody,
    check_stream_options,
    include_stop,
    parse,
)
from rootstock_llm.services.gateway.api.prompts import UNBOUNDED, budget_with_output, budget_without_output
from rootstock_llm.services.gateway.api.request_body import check_turn, joined_salt, parse_json, session_turn, starts_context
from rootstock_llm.services.gateway.generation import body_fields
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.decoding import Decoding
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import (
    GenerationParams,
    GenerationRequest,
    ModelInfo,
    Models,
    PromptInput,
    check_sets,
)
from rootstock_llm.services.gateway.output.output_parser import MakeParser
from rootstock_llm.services.gateway.remote.detokenizer_link import DetokPool
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.sampling_parameters import COMPLETION_TOKENS, Api


class Preparer(ChatPreparer):
    """Prepares the requests of OpenAI's endpoints. It is also the ChatPreparer of all APIs. Every method may raise ApiError."""

    def __init__(
        self,
        models: Models,
        tokenizer: TokenizerClient,
        detoks: DetokPool,
        make_parser: MakeParser,
        dropped: Callable[[], None],
        omits_hosted_tools: bool,
    ) -> None:
        """Makes the preparer.

        Args:
            detoks: The detokenizers that decode a prompt of token ids, for `echo`.
            dropped: See ChatPreparer.
            omits_hosted_tools: See ChatPreparer.
        """
        super().__init__(models, tokenizer, make_parser, dropped, omits_hosted_tools)
        self._detoks = detoks

    async def chat(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        return await self.prepare(chat_request(parse_json(body.take()), origin, self.omits_hosted_tools), origin)

    async def completion(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        request = parse(CompletionRequest, parse_json(body.take()), known_fields.COMPLETION, origin)
        if request.stream:
            origin.stream()
        _record_request_ids(request, origin, request.prompt)
        model = await self.generating_model(request.model, origin.caller)
        generation = completion_generation(request, model.vocab_size)
        checked = await self._completion_prompts(request, generation, model, origin)
        if len(checked) * generation.n > limits.MAX_BATCH_PROMPTS:
            raise bad_request("n", f"The number of prompts times 'n' may be at most {limits.MAX_BATCH_PROMPTS}.")
        check_sets(request.allowed_token_ids, request.banned_token_ids, len(checked) * generation.n)
        if generation.session is not None:
            is_alone = len(checked) * generation.n == 1
            check_turn(is_alone, "echo" if generation.wants_prompt_logprobs else None)
        inputs = _with_request_ids(checked, generation, request, origin)
        if request.echo:
            inputs = [replace(each, prefix=await self._text_of(each, generation, origin, model)) for each in inputs]
        return GenerationRequest.of(model, inputs, generation)

    async def embedding(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        request = parse(EmbeddingRequest, parse_json(body.take()), known_fields.EMBEDDING, origin)
        _record_request_ids(request, origin, request.input)
        model = await self.model_of(request.model, origin.caller)
        if not model.embedding_size:
            raise bad_request("model", "This model gives no embeddings.", "unsupported_model")
        generation = vector_generation(request, model.embedding_size)
        root = self._models.hash_root(model, origin.caller.cache_salt_of(generation.cache_salt))
        budget, special = budget_without_output(model), request.add_special_tokens is not False
        last_tokens = request.truncate_prompt_tokens
        if last_tokens is not None:
            budget, root = UNBOUNDED, b""
        checked = await prompts.of_completion(request.input, model, self._tokenizer, origin, "input", budget, root, special)
        if last_tokens is not None:
            last_tokens = min(last_tokens, model.context_len) if last_tokens >= 0 else model.context_len
            checked = [prompts.last_tokens_of(prompt, last_tokens, "truncate_prompt_tokens") for prompt in checked]
        return GenerationRequest.of(model, _with_request_ids(checked, generation, request, origin), generation)

    async def _completion_prompts(
        self, request: CompletionRequest, generation: GenerationParams, model: ModelInfo, origin: Origin
    ) -> list[PromptInput]:
        root = self._models.hash_root(model, origin.caller.cache_salt_of(generation.cache_salt))
        budget = budget_with_output(model, generation.session is not None)
        special = starts_context(request.session_params) if request.add_special_tokens is None else request.add_special_tokens
        return await prompts.of_completion(request.prompt, model, self._tokenizer, origin, "prompt", budget, root, special)

    async def text_of(self, ids: Sequence[int], skip_special_tokens: bool, origin: Origin, model: ModelInfo) -> str:
        """Returns the text of token ids."""
        return await decode_once(self._detoks, origin, ids, skip_special_tokens, model.source)

    async def _text_of(self, prompt: PromptInput, generation: GenerationParams, origin: Origin, model: ModelInfo) -> str:
        if prompt.text is not None:
            return prompt.text
        return await self.text_of(prompt.ids, generation.skip_special_tokens, origin, model)


def completion_generation(request: CompletionRequest, vocab_size: int) -> GenerationParams:
    """Returns the generation parameters that all prompts of a completion share. Raises ApiError.

    With `echo` and `logprobs`, the worker also returns the log probabilities of the prompt.
    """
    given = (request.max_completion_tokens, request.max_tokens, COMPLETION_TOKENS)
    max_tokens = next(value for value in given if value is not None)
    if max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens", "'max_tokens' may be 0 only with 'echo'.")
    logprobs, num_candidates = None, _candidates(request)
    if request.logprobs is not None:
        logprobs = pb.Logprobs(top=request.logprobs, prompt_from=0 if request.echo else None)
    elif num_candidates:
        logprobs = pb.Logprobs()
    check_stream_options(request)
    check_token_ids(request.logprob_token_ids or (), vocab_size, "logprob_token_ids")
    if logprobs is not None:
        logprobs.token_ids.extend(request.logprob_token_ids or ())
    elif request.logprob_token_ids:
        raise bad_request("logprob_token_ids", "'logprob_token_ids' requires 'logprobs'.")
    generation = generation_of(
        request,
        Api.COMPLETION,
        vocab_size,
        body_fields.COMPLETION,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        seed=request.seed,
        logprobs=logprobs,
        constraint=constraint_of(request),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        include_stop=include_stop(request),
        answer=request.shown(),
        cache_salt=joined_salt(request.cache_salt, request.extra_key),
        priority=request.priority,
        routing_key=request.routing_key or "",
        session=session_turn(request.session_params),
    )
    if not num_candidates:
        return generation
    return replace(generation, n=num_candidates, best=generation.n, shows_logprobs=request.logprobs is not None)


def _candidates(request: CompletionRequest) -> int:
    """Returns `best_of`, the number of outputs to generate per prompt. 0 if it is absent or equals `n`. Raises ApiError."""
    n, best_of = request.n or 1, request.best_of
    if best_of is None or best_of == n:
        return 0
    if best_of < n:
        raise bad_request("best_of", "'best_of' must not be less than 'n'.")
    if request.stream:
        raise bad_request(
            "best_of", "'best_of' above 'n' cannot be streamed, because the best outputs are known only at the end."
        )
    return best_of


def vector_generation(request: EmbeddingRequest, embedding_size: int) -> GenerationParams:
    """Returns the generation parameters that all inputs of an embedding request share. Raises ApiError."""
    if (request.dimensions or 0) > embedding_size:
        raise bad_request("dimensions", f"'dimensions' may be at most {embedding_size}, the size of this model's vectors.")
    embedding = pb.Embedding(dimensions=request.dimensions, normalize=request.normalize)
    salt = joined_salt(request.cache_salt, request.extra_key)
    vector = embedding_generation(request, salt, embedding, body_fields.EMBEDDING)
    return replace(vector, vector_as_base64=request.encoding_format == "base64")


def _record_request_ids(request: NamedBody, origin: Origin, given: Any) -> None:
    """Records in `origin` the request ids that the client chose for the request and its prompts, for aborts.

    Args:
        given: The prompts as the client sent them. Each prompt of a list gets the request id with the index of the prompt.
    """
    name = request.request_name
    if name is None:
        return
    many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    origin.name(name, [f"{name}_{index}" for index in range(min(len(given), limits.MAX_BATCH_PROMPTS))] if many else ())


def _with_request_ids(
    inputs: Sequence[PromptInput], generation: GenerationParams, request: NamedBody, origin: Origin
) -> list[PromptInput]:
    """Returns the prompts with the request ids that the client chose.

    A turn of a session always gets a request id, so that a later turn can name it as its parent.
    """
    name = request.request_name or (origin.request_id if generation.session is not None else "")
    many = bool(name) and len(inputs) > 1
    return prompts.named(inputs, [f"{name}_{index}" if many else name for index in range(len(inputs))])


async def decode_once(detoks: DetokPool, origin: Origin, ids: Sequence[int], skip_special_tokens: bool, model: str) -> str:
    """Returns the text of a complete sequence of token ids.

    If the call is cancelled, the detokenizer frees the state of the sequence. Raises ApiError.
    """
    sink = _WholeText()
    decoding = Decoding(
        sink,
        origin.request_id,
        list(ids),
        skip_special_tokens=skip_special_tokens,
        model=model,
        traceparent=origin.traceparent,
    )
    sink.decoding = decoding
    decoding.finish("")
    detoks.touch(decoding)
    try:
        return await sink.text
    finally:
        detoks.drop(decoding)


class _WholeText:
    """Collects the pieces of text of one Decoding. The future `text` gets the whole text when the Decoding is done."""

    decoding: Decoding

    def __init__(self) -> None:
        self.text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._parts: list[str] = []

    def on_text(self, text: str, count: int) -> None:
        self._parts.append(text)
        if self.decoding.done and not self.text.done():
            self.text.set_result("".join(self._parts))

    def on_decode_failed(self, error: ApiError) -> None:
        if not self.text.done():
            self.text.set_exception(error)
