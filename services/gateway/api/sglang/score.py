"""Serves /v1/score: joins the query with each item to a prompt, and computes scores from the log probabilities of the labels.

A label is a token id. Its score is its probability as the token after the prompt. Each HTTP request has its own ScoreCall.
Cancelling prepare() needs no cleanup. Error messages never repeat a text that the client sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import tokenizer_pb2
from rootstock_llm.services.gateway.api import known_fields
from rootstock_llm.services.gateway.api.generation_params import check_token_ids, score_generation
from rootstock_llm.services.gateway.api.prompts import ContextBudget, named, of_many_ids, of_texts
from rootstock_llm.services.gateway.api.request_body import RID_CHARS, parse_json
from rootstock_llm.services.gateway.api.sglang.sampling import parse
from rootstock_llm.services.gateway.api.sglang.types import ScoreRequest
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.choice import Delta
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest, ModelInfo, Models, PromptInput, check_chars
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.generation.usage import usage_of
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.shared import limits


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """The query and the items of a request: either all are texts, or all are lists of token ids."""

    query: Any  # a text (str) or token ids (list)
    items: Sequence[Any]  # each item has the type of the query
    item_first: bool  # whether a prompt is the item followed by the query, instead of the query followed by the item

    @property
    def are_texts(self) -> bool:
        return isinstance(self.query, str)

    def joined(self, query: Any, item: Any) -> Any:
        """Returns the prompt of an item."""
        return item + query if self.item_first else query + item


def inputs_of(request: ScoreRequest) -> ScoreInputs:
    """Returns the query and the items after a check of their types and number.

    The token ids are checked later. Raises ApiError.
    """
    query, items = request.query, request.items
    if not (isinstance(query, str) or (isinstance(query, list) and query)):
        raise bad_request("query", "'query' must be a text or a list of 1 or more token ids.")
    if isinstance(query, str) and isinstance(items, str):
        items = [items]
    if not isinstance(items, list) or not items:
        raise bad_request("items", "'items' must be a text, a list of texts or a list of lists of token ids.")
    if len(items) > limits.MAX_SCORE_ITEMS:
        message = f"'items' has {len(items)} items; at most {limits.MAX_SCORE_ITEMS} are allowed. Send several requests."
        raise bad_request("items", message)
    kind = str if isinstance(query, str) else list
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            form = "a text, as 'query' is" if kind is str else "a list of token ids, as 'query' is"
            raise bad_request(f"items[{index}]", f"'items[{index}]' must be {form}.")
        if kind is list and not item:
            raise bad_request(f"items[{index}]", f"'items[{index}]' is empty. Each item must have at least 1 token id.")
    return ScoreInputs(query, items, bool(request.item_first))


class ScoreCall:
    """Prepares and renders one request. The caller calls prepare() once and then renderer()."""

    def __init__(self, models: Models, tokenizer: TokenizerClient) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._softmax = False

    async def prepare(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        """Parses the body, tokenizes its prompts and returns the generation request. Raises ApiError."""
        request = parse(ScoreRequest, parse_json(body.take()), known=known_fields.SCORE)
        inputs = inputs_of(request)
        rids = _record_request_ids(request.rid, len(inputs.items), origin)
        model = await self._models.wait_for(request.model, origin.caller)
        if not model.generates:
            raise bad_request("model", "This model gives embeddings and no scores. Use /v1/embeddings.", "unsupported_model")
        check_token_ids(request.label_token_ids, model.vocab_size, "label_token_ids")
        self._softmax = bool(request.apply_softmax)
        root = self._models.hash_root(model, origin.caller.cache_salt_of(request.extra_key or ""))
        prompts = await self._prompts(inputs, model, origin, root)
        score = pb.Score(label_token_ids=request.label_token_ids)
        params = score_generation(request, request.extra_key or "", score)
        return GenerationRequest.of(model, named(prompts, rids), params)

    def renderer(self, request: RunningRequest, _created: int, model: str, _token_texts: TokenTexts) -> ScoreRenderer:
        return ScoreRenderer(request, model, self._softmax)

    async def _prompts(self, inputs: ScoreInputs, model: ModelInfo, origin: Origin, hash_root: bytes) -> list[PromptInput]:
        """Returns one prompt per item.

        A prompt that is longer than the context is refused, because a cut prompt has another score.
        """
        budget = ContextBudget(model.context_len, 0, cuts=False)
        if inputs.are_texts:
            check_chars(len(inputs.query) * len(inputs.items) + sum(map(len, inputs.items)), "items")
            texts = [inputs.joined(inputs.query, item) for item in inputs.items]
            call = tokenizer_pb2.EncodeRequest(
                request_id=origin.request_id, texts=texts, add_special_tokens=True, hash_root=hash_root
            )
            prompts = await of_texts(call, self._tokenizer, "items", model, origin, budget)
        else:
            query = await of_many_ids(inputs.query, model.vocab_size, "query")
            prompts = await _of_ids(inputs, query, model, budget)
        _check_tokens(sum(len(prompt.ids) for prompt in prompts))
        return [budget.fit(prompt, f"items[{index}]") for index, prompt in enumerate(prompts)]


async def _of_ids(inputs: ScoreInputs, query: PromptInput, model: ModelInfo, budget: ContextBudget) -> list[PromptInput]:
    _check_tokens(len(query.ids) * len(inputs.items) + sum(map(len, inputs.items)))
    prompts = []
    for index, ids in enumerate(inputs.items):
        where = f"items[{index}]"
        budget.check(len(query.ids) + len(ids), where)
        item = await of_many_ids(ids, model.vocab_size, where)
        prompts.append(PromptInput(tokenizer_pb2.TokenIds(ids=inputs.joined(list(query.ids), list(item.ids))).ids, None))
    return prompts


def _check_tokens(tokens: int) -> None:
    if tokens > limits.MAX_SCORE_TOKENS:
        message = (
            f"The prompts have {tokens} tokens, with 'query' counted once for each item; "
            f"at most {limits.MAX_SCORE_TOKENS} are allowed. Send several requests."
        )
        raise ApiError(413, message, param="items", code="request_too_large")


def _record_request_ids(rid: str | None, count: int, origin: Origin) -> list[str]:
    """Returns the request id of each prompt, or "" if the client sent none.

    Records the ids in `origin`, so that clients can abort the request by them and by `rid`.
    """
    if rid is None:
        return [""] * count
    rids = [f"{rid}_{index}" for index in range(count)] if count > 1 else [rid]
    assert len(rid) <= RID_CHARS, "a rid has at most RID_CHARS characters"
    origin.name(rid, rids)
    return rids


class ScoreRenderer:
    """Renders the response: for each item, the list of its label scores. Items and labels stay in the client's order."""

    def __init__(self, request: RunningRequest, model: str, softmax: bool) -> None:
        self._request = request
        self._model = model
        self._softmax = softmax

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        return orjson.dumps(
            {
                "object": "scoring",
                "scores": [_scores(delta.choice.label_logprobs(), self._softmax).tolist() for delta in deltas],
                "model": self._model,
                "usage": usage_of(self._request),
            }
        )


def _scores(logprobs: NDArray[np.float64], softmax: bool) -> NDArray[np.float64]:
    """Returns the scores of one item's labels from their log probabilities.

    Without `softmax`, scores are probabilities over the vocabulary. With `softmax`, they are scaled to the sum 1. If every
    label has the probability 0, scores with `softmax` are equal.
    """
    if not softmax:
        return np.exp(logprobs)
    peak = logprobs.max()
    weights = np.exp(logprobs - peak) if np.isfinite(peak) else np.ones_like(logprobs)
    return np.asarray(weights / weights.sum())
