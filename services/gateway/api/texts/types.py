"""Request and response bodies of the routes on texts and on the gateway's state.

Names are vLLM's for the routes that vLLM has, and SGLang's for the others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rootstock_llm.services.gateway.api.document.answer import Count, ResponseModel
from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.shared import limits

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
Texts = Annotated[Any, WithJsonSchema(_TEXTS)]
Ids = Annotated[Any, WithJsonSchema(_IDS)]
_MODEL = "A name that /v1/models lists; may be left out where one model is served."


class TokenizeRequest(Body):
    model: str | None = Field(None, description=_MODEL)
    prompt: Texts = Field(description="A text or a list of texts.")
    add_special_tokens: bool | None = Field(None, description="Default true.")


class DetokenizeRequest(Body):
    model: str | None = Field(None, description=_MODEL)
    tokens: Ids = Field(description="A list of token ids or a list of such lists.")
    skip_special_tokens: bool | None = Field(None, description="Default true.")


class ParseCallRequest(Body):
    text: str = Field(max_length=limits.MAX_RENDERED_CHARS, description="An output with its marks.")
    tools: list[dict[str, Any]] = Field(description="Same form as in chat completions.")
    tool_call_parser: str = Field(description="A format's name, ours or SGLang's.")


class SeparateRequest(Body):
    text: str = Field(max_length=limits.MAX_RENDERED_CHARS, description="An output with its marks.")
    reasoning_parser: str = Field(description="A format's name, ours or SGLang's.")


class Tokens(ResponseModel):
    """Token ids. If `prompt` is a list, each text has its own list."""

    tokens: list[Count] | list[list[Count]]
    count: Count | list[Count]
    max_model_len: Count


class DetokenizedText(ResponseModel):
    """A text, or a text for each list of token ids."""

    text: str | list[str]


class ParsedCall(ResponseModel):
    tool_index: Count = Field(description="Index of the tool in the request.")
    name: str
    parameters: str = Field(description="JSON.")


class ParsedCalls(ResponseModel):
    normal_text: str
    calls: list[ParsedCall]


class Separated(ResponseModel):
    reasoning_text: str
    text: str


class Version(ResponseModel):
    version: str


class WorkerLoad(ResponseModel):
    worker_id: str
    num_reqs: Count = Field(description="Open requests of the worker.")
    num_waiting_reqs: Count
    num_tokens: Count = Field(description="Tokens of KV cache in use.")


class WorkerStanding(ResponseModel):
    """A worker that discovery has found.

    Its figures are the last that it reported, and cover the requests of all gateways. They are null while it is not connected.
    Totals count from its start.
    """

    worker_id: str | None = Field(description="Null if this gateway has never been connected to it.")
    model: str | None
    role: Literal["both", "prefill", "decode"] | None
    state: Literal["ready", "silent", "paused", "draining", "hung", "unused", "lost", "starting"] = Field(
        description="silent: no report for some seconds. unused: gets no requests from this gateway for a while, as after faults."
        " lost: it was connected before. starting: it was never connected."
    )
    told_s_ago: float | None = Field(description="Seconds since the last report.")
    num_running: Count | None
    num_waiting: Count | None
    max_running: Count | None
    kv_used_tokens: Count | None = Field(description="Tokens that running requests use.")
    kv_cached_tokens: Count | None = Field(description="Tokens that only the prefix cache uses.")
    kv_tokens: Count | None = Field(description="Tokens that fit into the KV pool.")
    prompt_tokens: Count | None
    cached_prompt_tokens: Count | None
    generated_tokens: Count | None
    retractions: Count | None


class RedisStanding(ResponseModel):
    """Whether each Redis server responds. Null if the gateway does not use it."""

    index: bool | None
    limits: bool | None = Field(description="Shared limits of API keys.")
    kept: bool | None = Field(description="The store of responses, files and batches.")


class GatewaySurroundings(ResponseModel):
    """State of the gateway's dependencies. Null for a dependency that the gateway does not use."""

    redis: RedisStanding
    key_file_valid: bool | None
    tls_files_valid: bool | None
    certificate_ends_in_s: int | None = Field(
        description="Seconds until the gateway's certificate expires; negative if it has expired."
    )
    unresolved: list[str] = Field(description="Services of which a DNS name cannot be resolved.")
    scraped_s_ago: float | None = Field(description="Seconds since the metrics were last scraped; null if never.")


class GatewayStanding(ResponseModel):
    """The gateway that sends the response."""

    waiting: Count = Field(description="Choices that wait for a worker with free capacity.")
    workers: Count = Field(description="Workers that receive requests.")
    tokenizers: Count = Field(description="Connected tokenizers.")
    detokenizers: Count = Field(description="Connected detokenizers.")
    surroundings: GatewaySurroundings


class ServedModel(ResponseModel):
    id: str
    max_model_len: Count
    vocab_size: Count
    is_generation: bool
    embedding_size: Count
    deterministic: bool = Field(
        description="Whether equal requests with a seed or temperature 0 get equal outputs, whatever other requests run."
    )


class ServerInfo(ResponseModel):
    version: str
    model_path: str
    served_model_name: str
    models: list[ServedModel]
    loads: list[WorkerLoad]
    workers: list[WorkerStanding]
    gateway: GatewayStanding
