"""Describes the operations of OpenAI's endpoints, for the OpenAPI document."""

from __future__ import annotations

from rootstock_llm.services.gateway.api.document.operation import EVENTS, JSON, ApiOperation
from rootstock_llm.services.gateway.api.openai.answers import (
    ChatCompletion,
    ChatEvent,
    Completion,
    CompletionEvent,
    EmbeddingList,
    ModelCard,
    ModelList,
)
from rootstock_llm.services.gateway.api.openai.types import ChatCompletionRequest, CompletionRequest, EmbeddingRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MODELS = "/v1/models"
MODEL = f"{MODELS}/{{model_id}}"

_TAG = "OpenAI"
OPERATIONS = (
    ApiOperation(
        "post",
        CHAT,
        _TAG,
        "Create a chat completion",
        {JSON: ChatCompletion, EVENTS: ChatEvent},
        ChatCompletionRequest,
        generates=True,
        accepts_report_header=True,
        takes_tools=True,
        example={
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
            "max_completion_tokens": 64,
            "temperature": 0,
        },
    ),
    ApiOperation(
        "post",
        COMPLETIONS,
        _TAG,
        "Create a completion",
        {JSON: Completion, EVENTS: CompletionEvent},
        CompletionRequest,
        generates=True,
        accepts_report_header=True,
        example={"prompt": "Count from 3 to 9.", "max_tokens": 32, "temperature": 0},
    ),
    ApiOperation(
        "post",
        EMBEDDINGS,
        _TAG,
        "Create embeddings",
        {JSON: EmbeddingList},
        EmbeddingRequest,
        generates=True,
        example={"input": ["What is 17 + 25?", "Count from 3 to 9."]},
    ),
    ApiOperation("get", MODELS, _TAG, "List the served models", {JSON: ModelList}, statuses=(503,)),
    ApiOperation(
        "get",
        MODEL,
        _TAG,
        "Get a model",
        {JSON: ModelCard},
        statuses=(403, 404, 503),
        parameters={"model_id": "A name that /v1/models lists; it may have slashes."},
    ),
)
