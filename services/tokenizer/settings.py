"""The tokenizer's settings: flags, environment (ROOTSTOCK_*), defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from rootstock_llm.services.shared import limits, output_formats
from rootstock_llm.services.shared.output_formats import OutputFormats
from rootstock_llm.services.shared.settings import ServiceSettings, served_name

ToolParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
]
ReasoningParser = Literal["auto", "none", "think", "think_open", "mistral_think", "harmony"]


class TokenizerSettings(ServiceSettings):
    """Turns text and chat messages into token ids for gateways."""

    port: int = Field(7001, ge=1, le=65535, description="gRPC port.")
    metrics_host: str = Field("127.0.0.1", description="Listen address of the metrics port.")
    metrics_port: int = Field(9101, ge=1, le=65535, description="Port of GET /metrics.")
    model: Path = Field(description="Folder of the Hugging Face model. Only its tokenizer and template files are read.")
    served_model_name: str = Field("", description="Model name that clients use. Empty: the name of the model folder.")
    chat_template: str = Field(
        "", description="File with a Jinja chat template that replaces the model's templates. Empty: the model's templates."
    )
    tool_call_parser: ToolParser = Field(
        "auto",
        description="Format in which the model writes tool calls. auto: detected from the delimiters or the instructions in the"
        " chat template. none: calls remain text.",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Format of the model's reasoning. auto: detected from the chat template. none: reasoning remains text.",
    )
    encode_threads: int = Field(2, ge=1, description="Number of encoding batches that run at the same time.")
    max_batch_texts: int = Field(256, ge=1, description="Maximum number of texts in one encoding batch.")
    max_batch_chars: int = Field(
        262_144,
        ge=1,
        description="Largest number of characters in one encoding batch. A longer request is encoded in pieces.",
    )
    max_request_chars: int = Field(
        limits.MAX_RENDERED_CHARS,
        ge=1,
        le=limits.MAX_RENDERED_CHARS,
        description="Maximum number of characters in all texts of a request, or in its rendered chat.",
    )
    max_encoding_bytes: int = Field(
        limits.MAX_ENCODING_BYTES,
        ge=1,
        description="Largest number of bytes of requests in progress. Requests of more than max_batch_chars bytes have a separate"
        " budget of this size.",
    )
    encoding_wait_s: float = Field(
        limits.MAX_ENCODING_WAIT_S,
        gt=0,
        description="Seconds for which a request waits for its share of max_encoding_bytes before it is refused as busy.",
    )
    render_processes: int = Field(3, ge=1, description="Number of processes that render chat templates.")
    render_memory_bytes: int = Field(1 << 29, ge=1 << 27, description="Address space limit of a rendering process in bytes.")
    render_seconds: float = Field(
        limits.MAX_TEMPLATE_SECONDS,
        gt=0,
        description="Seconds after which the process that renders a chat template is killed and the request is refused.",
    )
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="Seconds after which a connection accepts no new calls, so that gateways look up replicas by DNS again. 0:"
        " never.",
    )

    @property
    def model_name(self) -> str:
        """Model name that clients use."""
        return served_name(self.model, self.served_model_name)

    def output_formats(self, chat_templates: Mapping[str, str]) -> OutputFormats:
        """Returns the configured formats, or those detected in the model's chat templates (by name)."""
        detected = output_formats.detect_in(chat_templates)
        return OutputFormats(_chosen(self.tool_call_parser, detected.tools), _chosen(self.reasoning_parser, detected.reasoning))


def _chosen(setting: str, detected: str) -> str:
    return {"auto": detected, "none": output_formats.NONE}.get(setting, setting)
