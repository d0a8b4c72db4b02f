"""Request bodies of the Responses API, for validation and documentation. items.py checks the items in them.

Source: OpenAI's API reference, POST /v1/responses and /v1/conversations.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rootstock_llm.services.gateway.api.request_body import Effort, PlacedBody, SamplingBody, ThinkingBody, parameter
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.sampling_parameters import UINT32_MAX

_ITEMS_SCHEMA = {"type": "array", "items": {"type": "object"}}
_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, _ITEMS_SCHEMA], "title": "Input"}
_METADATA_SCHEMA = {"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]}

# pydantic accepts any value of these types. Functions check the values, so that an error names the element.
Input = Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
Items = Annotated[Any, WithJsonSchema(_ITEMS_SCHEMA)]
Metadata = Annotated[Any, WithJsonSchema(_METADATA_SCHEMA)]
Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextConfig(Body):
    format: dict[str, Any] | None = Field(
        None, description="An object with type text, json_object, or json_schema (with name and schema)."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted without effect.")


class ReasoningConfig(Body):
    effort: Effort | None = Field(None, description="Passed to the chat template.")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted without effect, because a reasoning item has the whole reasoning."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Same as summary.")


class ConversationReference(Body):
    id: str = Field(max_length=limits.MAX_STORED_ID_CHARS)


class ResponsesRequest(ThinkingBody, SamplingBody, PlacedBody):
    """Body of a request for a response.

    Sampling parameters that OpenAI's Responses API lacks have the names of chat completions.
    """

    model: str | None = Field(None, description="A name that /v1/models lists. Optional if the server has one model.")
    input: Input = Field(None, description="A text, or a list of items.")
    instructions: str | None = Field(None, description="System message before all items. A later response does not inherit it.")
    previous_response_id: str | None = Field(
        None, max_length=limits.MAX_STORED_ID_CHARS, description="Id of the stored response that this response follows."
    )
    conversation: str | ConversationReference | None = Field(
        None, description="Conversation whose items precede the input. The new items are added to it."
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=UINT32_MAX,
        description="Maximum number of output tokens, including reasoning. Default: as many as the context allows.",
    )
    max_tool_calls: int | None = Field(
        None, ge=1, description="Limit of calls of hosted tools. Accepted without effect, because hosted tools never run."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, max_length=limits.MAX_TOOLS, description="Functions that the model may call."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="Calls that the output may have: none, auto (the default), required, a function or allowed_tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether an output may have several calls. Default true.")
    text: TextConfig | None = Field(None, description="Format of the output's text.")
    reasoning: ReasoningConfig | None = Field(None, description="Settings of the model's reasoning.")
    include: list[Include] | None = Field(
        None,
        fail_fast=True,
        description="Optional parts of the response: reasoning.encrypted_content, and message.output_text.logprobs for requests"
        " without tools to models that do not reason. Other values have no effect.",
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_TOP_LOGPROBS,
        description=(
            "Number of most likely tokens to return per output token, if include has message.output_text.logprobs. Default 0."
        ),
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest items are removed until the prompt fits into the context. Default disabled."
    )
    store: bool | None = Field(
        None, description="Whether the response is stored, so that a later response can follow it. Default true."
    )
    background: bool | None = Field(
        None,
        description=(
            "Whether to return at once and generate the response in the background. GET then returns the response or its stream."
        ),
    )
    stream: bool | None = Field(None, description="Whether the output is sent as server-sent events while it is generated.")
    metadata: Metadata = Field(None, description="Up to 16 names with string values, which the response repeats.")
    seed: int | None = parameter("seed")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_CACHE_SALT_CHARS,
        description="Only requests with the same cache_salt share cached prefixes.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Additional variables of the chat template.")


class ConversationRequest(Body):
    items: Items = Field(None, description="Up to 20 items with which the conversation begins.")
    metadata: Metadata = Field(None, description="Up to 16 names with string values.")


class ConversationUpdate(Body):
    metadata: Metadata = Field(description="Replaces the metadata.")


class ItemsRequest(Body):
    items: Items = Field(description="Up to 20 items that are added at the end of the conversation.")
