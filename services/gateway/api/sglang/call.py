"""Prepares a request of /generate or /encode, and makes its renderer.

Each HTTP request has its own GenerateCall or EncodeCall. The caller calls prepare() once and then renderer(). Cancelling
prepare() needs no cleanup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import tokenizer_pb2
from rootstock_llm.services.gateway.api.generation_params import embedding_generation
from rootstock_llm.services.gateway.api.prompts import (
    ContextBudget,
    budget_with_output,
    budget_without_output,
    named,
    of_many_ids,
    of_texts,
)
from rootstock_llm.services.gateway.api.request_body import parse_json, starts_context
from rootstock_llm.services.gateway.api.sglang.batch import Form, Inputs, generations_of, inputs_of, rids_of
from rootstock_llm.services.gateway.api.sglang.render import EncodeRenderer, GenerateRenderer
from rootstock_llm.services.gateway.api.sglang.sampling import parse
from rootstock_llm.services.gateway.api.sglang.types import NativeEncodeRequest, NativeGenerateRequest
from rootstock_llm.services.gateway.generation import body_fields
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest, ModelInfo, Models, PromptInput
from rootstock_llm.services.gateway.generation.routed_experts import RoutedExpertsParams
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient


class PromptSource:
    """Turns the inputs of requests into prompts of token ids. The tokenizer encodes texts. Raises ApiError."""

    def __init__(self, tokenizer: TokenizerClient) -> None:
        self._tokenizer = tokenizer

    async def prompts(
        self,
        inputs: Inputs,
        model: ModelInfo,
        origin: Origin,
        budget: ContextBudget,
        hash_root: bytes,
        add_special_tokens: bool = True,
    ) -> list[PromptInput]:
        if inputs.field == "text":
            call = tokenizer_pb2.EncodeRequest(
                request_id=origin.request_id, texts=inputs.prompts, add_special_tokens=add_special_tokens, hash_root=hash_root
            )
            encoded = await of_texts(call, self._tokenizer, "text", model, origin, budget)
        else:
            for i, ids in enumerate(inputs.prompts):
                budget.check(len(ids), inputs.where(i))
            encoded = [await of_many_ids(ids, model.vocab_size, inputs.where(i)) for i, ids in enumerate(inputs.prompts)]
        return [budget.fit(prompt, inputs.where(i)) for i, prompt in enumerate(encoded)]


def _record_request_ids(given: Any, inputs: Inputs, origin: Origin) -> list[str]:
    """Returns the request id of each prompt, and records the ids in `origin`, so that clients can abort the request by them.

    A single id that the client sent for several prompts also aborts the request.
    """
    rids = rids_of(given, inputs, origin.request_id)
    origin.name(given if isinstance(given, str) else None, rids)
    return rids


class GenerateCall:
    def __init__(self, models: Models, source: PromptSource) -> None:
        self._models = models
        self._source = source
        self._many = False  # whether the response is a list
        self._texts = False  # whether entries of log probabilities have the tokens' texts
        self._forms: list[Form] = []  # one per prompt

    async def prepare(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        """Parses the body, tokenizes its prompts and returns the generation request. Raises ApiError."""
        request = parse(NativeGenerateRequest, parse_json(body.take()))
        inputs = inputs_of(request)
        rids = _record_request_ids(request.rid, inputs, origin)
        if request.stream:
            origin.stream()
        model = await self._models.wait_for(request.model, origin.caller)
        if not model.generates:
            raise bad_request("model", "This model gives embeddings only. Use /encode.", "unsupported_model")
        generations = generations_of(request, inputs, model.vocab_size)
        budget = budget_with_output(model, in_session=generations[0].params.session is not None)
        root = self._models.hash_root(model, origin.caller.cache_salt_of(request.extra_key or ""))
        prompts = await self._source.prompts(inputs, model, origin, budget, root, starts_context(request.session_params))
        for prompt, one in zip(prompts, generations, strict=True):
            _check_start(one.form, len(prompt.ids))
        routed = self._routed_experts(request, model, prompts)
        self._many = inputs.many or generations[0].params.n > 1
        self._texts = bool(request.return_text_in_logprobs)
        self._forms = [one.form for one in generations]
        prepared = GenerationRequest(model, tuple(named(prompts, rids)), tuple(one.params for one in generations))
        return prepared if routed is None else prepared.with_params(lambda params: replace(params, routed_experts=routed))

    def _routed_experts(
        self, request: NativeGenerateRequest, model: ModelInfo, prompts: Sequence[PromptInput]
    ) -> RoutedExpertsParams | None:
        """Returns the requested routed experts, or None. Raises ApiError if they cannot be returned for this request."""
        if not request.return_routed_experts:
            return None
        per_token, start = model.routed_experts_per_token, request.routed_experts_start_len or 0
        if not per_token:
            message = (
                "'return_routed_experts' requires a model with experts, and workers with --enable-return-routed-experts."
                " No worker of this model returns routed experts."
            )
            raise bad_request("return_routed_experts", message, "unsupported_parameter")
        if request.session_params is not None:
            raise bad_request("return_routed_experts", "'return_routed_experts' is not supported in a session.")
        if start > min(len(prompt.ids) for prompt in prompts):
            message = "'routed_experts_start_len' must not exceed the number of prompt tokens."
            raise bad_request("routed_experts_start_len", message)
        return RoutedExpertsParams(start, per_token)

    def renderer(self, request: RunningRequest, _created: int, _model: str, token_texts: TokenTexts) -> GenerateRenderer:
        return GenerateRenderer(request, self._many, self._forms, token_texts if self._texts else None)


def _check_start(form: Form, prompt_tokens: int) -> None:
    if form.logprobs is not None and form.logprobs.start >= prompt_tokens:
        raise bad_request("logprob_start_len", "'logprob_start_len' must be less than the number of prompt tokens.")


class EncodeCall:
    def __init__(self, models: Models, source: PromptSource) -> None:
        self._models = models
        self._source = source
        self._many = False

    async def prepare(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        """Parses the body, tokenizes its prompts and returns the generation request. Raises ApiError."""
        request = parse(NativeEncodeRequest, parse_json(body.take()))
        inputs = inputs_of(request)
        rids = _record_request_ids(request.rid, inputs, origin)
        model = await self._models.wait_for(request.model, origin.caller)
        _check_dimensions(request.dimensions, model)
        root = self._models.hash_root(model, origin.caller.cache_salt_of(request.extra_key or ""))
        prompts = await self._source.prompts(inputs, model, origin, budget_without_output(model), root)
        self._many = inputs.many
        embedding = pb.Embedding(dimensions=request.dimensions)
        fields = body_fields.ENCODE.within("", inputs.field)
        params = embedding_generation(request, request.extra_key or "", embedding, fields)
        return GenerationRequest.of(model, named(prompts, rids), params)

    def renderer(self, _request: RunningRequest, _created: int, _model: str, _token_texts: TokenTexts) -> EncodeRenderer:
        return EncodeRenderer(self._many)


def _check_dimensions(dimensions: int | None, model: ModelInfo) -> None:
    if not model.embedding_size:
        raise bad_request("model", "This model gives no embeddings.", "unsupported_model")
    if dimensions is not None and dimensions > model.embedding_size:
        raise bad_request(
            "dimensions", f"'dimensions' may be at most {model.embedding_size}, the size of this model's embeddings."
        )
