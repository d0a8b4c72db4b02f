"""The tokenizer's settings: flags, environment (ROOTSTOCK_*), defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from services.shared import limits, output_formats
from services.shared.output_formats import OutputFormats
from services.shared.served_name import served_name
from services.shared.settings import ServiceSettings

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
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on.")
    metrics_port: int = Field(9101, ge=1, le=65535, description="Port of GET /metrics.")
    model: Path = Field(description="Folder of a Hugging Face model; only its tokenizer and template files are read.")
    served_model_name: str = Field("", description="Name that clients use; by default the model folder's own name.")
    chat_template: str = Field("", description="File of a Jinja chat template that replaces the model's own. Empty: the model's.")
    tool_call_parser: ToolParser = Field(
        "auto",
        description="How the model writes calls of tools; auto: by the marks or the instruction in its chat template, none: calls"
        " are text.",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="How the model marks its reasoning; auto: by its chat template, none: reasoning is text."
    )
    encode_threads: int = Field(2, ge=1, description="Encoding calls that run at the same time.")
    max_batch_texts: int = Field(256, ge=1, description="Texts of several requests encoded in one call.")
    max_batch_chars: int = Field(
        262_144, ge=1, description="Characters encoded in one call; a longer request is encoded alone, in pieces."
    )
    max_request_chars: int = Field(
        limits.MAX_RENDERED_CHARS,
        ge=1,
        le=limits.MAX_RENDERED_CHARS,
        description="Characters of one request's texts, or of its rendered chat template.",
    )
    max_encoding_bytes: int = Field(
        limits.MAX_ENCODING_BYTES,
        ge=1,
        description="Bytes of requests rendered and encoded at the same time; those above --max-batch-chars have as much again.",
    )
    encoding_wait_s: float = Field(
        limits.MAX_ENCODING_WAIT_S,
        gt=0,
        description="Seconds that a request waits for its share of it before it is refused as busy.",
    )
    render_processes: int = Field(3, ge=1, description="Chat templates rendered at the same time, each in its own process.")
    render_memory_bytes: int = Field(1 << 29, ge=1 << 27, description="Address space of a rendering process in bytes.")
    render_seconds: float = Field(
        limits.MAX_TEMPLATE_SECONDS, gt=0, description="Seconds after which a rendering process is killed."
    )
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="Seconds after which clients have to connect again, so that those that use DNS find new replicas; 0: never.",
    )

    @property
    def model_name(self) -> str:
        """The name that clients know the model by."""
        return served_name(self.model, self.served_model_name)

    def output_formats(self, chat_templates: Mapping[str, str]) -> OutputFormats:
        """chat_templates: the model's own, by name."""
        detected = output_formats.detect_in(chat_templates)
        return OutputFormats(_chosen(self.tool_call_parser, detected.tools), _chosen(self.reasoning_parser, detected.reasoning))


def _chosen(setting: str, detected: str) -> str:
    return {"auto": detected, "none": output_formats.NONE}.get(setting, setting)
