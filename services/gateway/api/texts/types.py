"""Request and response bodies of the routes that tokenize and parse texts or report the gateway's state.

Fields have vLLM's names on routes that vLLM has, and SGLang's names on all other routes.
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
_MODEL = "A name that /v1/models lists. Optional if the server has one model."


class TokenizeRequest(Body):
    model: str | None = Field(None, description=_MODEL)
    prompt: Texts = Field(description="A text or a list of texts.")
    add_special_tokens: bool | None = Field(None, description="Whether the tokenizer adds special tokens. Default true.")


class DetokenizeRequest(Body):
    model: str | None = Field(None, description=_MODEL)
    tokens: Ids = Field(description="A list of token ids or a list of such lists.")
    skip_special_tokens: bool | None = Field(None, description="Whether the text omits special tokens. Default true.")


class ParseCallRequest(Body):
    text: str = Field(max_length=limits.MAX_RENDERED_CHARS, description="Output of a model, with the marks of its calls.")
    tools: list[dict[str, Any]] = Field(fail_fast=True, description="The tools of the request, in the form of chat completions.")
    tool_call_parser: str = Field(description="Name of the format of the calls, either this server's or SGLang's.")


class SeparateRequest(Body):
    text: str = Field(max_length=limits.MAX_RENDERED_CHARS, description="Output of a model, with the marks of its reasoning.")
    reasoning_parser: str = Field(description="Name of the format of the reasoning, either this server's or SGLang's.")


class Tokens(ResponseModel):
    """Token ids. If `prompt` is a list, each text has its own list."""

    tokens: list[Count] | list[list[Count]]
    count: Count | list[Count]
    max_model_len: Count


class DetokenizedText(ResponseModel):
    """The text of the token ids. If `tokens` is a list of lists, `text` has one text per list."""

    text: str | list[str]


class ParsedCall(ResponseModel):
    tool_index: Count = Field(description="Index of the tool in the request.")
    name: str
    parameters: str = Field(description="Arguments of the call, as JSON.")


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
    num_reqs: Count = Field(description="Running and waiting requests of the worker.")
    num_waiting_reqs: Count = Field(description="Requests that wait at the worker.")
    num_tokens: Count = Field(description="Tokens of KV cache in use.")


class WorkerStanding(ResponseModel):
    """A worker that discovery has found.

    max_running and kv_tokens are limits, which stay after the worker has disconnected. All other counts are from the worker's
    last load report, and cover the requests of all gateways. They are null while the worker is not connected. Token totals and
    retractions count from the worker's start.
    """

    worker_id: str | None = Field(description="Null if this gateway has never connected to the worker.")
    model: str | None
    role: Literal["both", "prefill", "decode"] | None
    state: Literal["ready", "silent", "paused", "draining", "hung", "unused", "lost", "starting"] = Field(
        description="silent: no report for some seconds. paused: an operator has paused the worker. draining: accepts no new"
        " requests. hung: its scheduler makes no progress. unused: this gateway sends the worker no requests for a while, for"
        " example after faults. lost: not connected, but was connected before. starting: was never connected."
    )
    told_s_ago: float | None = Field(description="Seconds since the worker's last load report.")
    num_running: Count | None = Field(description="Running requests.")
    num_waiting: Count | None = Field(description="Requests that wait at the worker.")
    max_running: Count | None = Field(description="Maximum number of running requests.")
    kv_used_tokens: Count | None = Field(description="Tokens of the KV pool that running requests use.")
    kv_cached_tokens: Count | None = Field(description="Tokens of the KV pool that only the prefix cache holds.")
    kv_tokens: Count | None = Field(description="Tokens that fit into the KV pool.")
    prompt_tokens: Count | None = Field(description="Total of prompt tokens.")
    cached_prompt_tokens: Count | None = Field(description="Total of prompt tokens whose KV was cached.")
    generated_tokens: Count | None = Field(description="Total of generated tokens.")
    retractions: Count | None = Field(description="Total of running requests that were put back to wait, because KV was full.")


class RedisStanding(ResponseModel):
    """Whether each Redis server responds. Null for a server that the gateway does not use."""

    index: bool | None = Field(description="Prefix index for routing.")
    limits: bool | None = Field(description="Shared limits of API keys.")
    kept: bool | None = Field(description="The store of responses, files and batches.")


class GatewaySurroundings(ResponseModel):
    """State of the services and files that the gateway depends on. Null for a service or file that it does not use."""

    redis: RedisStanding
    key_file_valid: bool | None
    tls_files_valid: bool | None
    certificate_ends_in_s: int | None = Field(
        description="Seconds until the gateway's certificate expires; negative if it has expired."
    )
    unresolved: list[str] = Field(description="Services that have a DNS name which cannot be resolved.")
    scraped_s_ago: float | None = Field(description="Seconds since the metrics were last scraped; null if never.")


class GatewayStanding(ResponseModel):
    """State of the gateway that sends this response."""

    waiting: Count = Field(
        description="Choices that wait for a worker with free capacity, and requests that wait for their model's first worker."
    )
    workers: Count = Field(description="Workers to which this gateway may send requests.")
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
        description="Whether equal requests with a seed or temperature 0 get equal outputs, no matter which other requests run."
    )
    quantization: str = Field(
        description="Quantization of the weights, such as `int8` or `awq 4 bits by 128`. Empty: they are not quantized."
    )


class ServerInfo(ResponseModel):
    version: str
    model_path: str
    served_model_name: str
    models: list[ServedModel]
    loads: list[WorkerLoad]
    workers: list[WorkerStanding]
    gateway: GatewayStanding
