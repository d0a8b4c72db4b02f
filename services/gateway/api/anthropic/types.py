"""Bodies of Anthropic's Messages API, for validation and documentation. translation.py checks messages, tools and blocks.

Source: Anthropic's API reference, POST /v1/messages and /v1/messages/count_tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rootstock_llm.services.gateway.api.request_body import Effort, PlacedBody, parameter
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.sampling_parameters import UINT32_MAX

_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": limits.MAX_CHAT_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
    },
}
# pydantic accepts any value of the types Messages and System. translation.py checks the values, so that an error names the
# element.
Messages = Annotated[Any, WithJsonSchema(_MESSAGES_SCHEMA)]
System = Annotated[Any, WithJsonSchema({"anyOf": [*_BLOCKS["anyOf"], {"type": "null"}]})]


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None, ge=1, description="Accepted without effect. max_tokens limits reasoning and text together."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="Whether thinking blocks have the reasoning (summarized, the default) or are empty (omitted)."
    )


class OutputConfig(Body):
    effort: Effort | None = Field(None, description="Passed to the chat template.")
    format: dict[str, Any] | None = Field(
        None, description="An object with type json_schema and the schema that the output's text must follow."
    )


class CountTokensRequest(PlacedBody):
    model: str | None = Field(None, description="A name that /v1/models lists. Optional if the server has one model.")
    messages: Messages
    system: System = Field(None, description="A text, or blocks of text.")
    tools: list[dict[str, Any]] | None = Field(
        None,
        fail_fast=True,
        description="Functions that the model may call. This server cannot run Anthropic's hosted tools.",
    )
    tool_choice: dict[str, Any] | None = Field(
        None, description="An object with the type auto, any, tool or none. disable_parallel_tool_use allows one call at most."
    )
    thinking: Thinking | None = Field(
        None, description="Whether the model reasons, if its chat template has a switch for it. Default disabled."
    )
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(None, description="The same as output_config.format.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Additional variables of the chat template.")


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, le=UINT32_MAX, description="Maximum number of output tokens, including reasoning.")
    stream: bool | None = Field(None, description="Whether the output is sent as server-sent events while it is generated.")
    stop_sequences: list[str] | None = Field(None, fail_fast=True)
    temperature: float | None = parameter("temperature")
    top_p: float | None = parameter("top_p")
    top_k: int | None = parameter("top_k")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=limits.MAX_CACHE_SALT_CHARS,
        description="Only requests with the same cache_salt share cached prefixes.",
    )
