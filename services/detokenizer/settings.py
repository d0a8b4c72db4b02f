"""The detokenizer's settings: flags, environment (ROOTSTOCK_*), defaults."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from rootstock_llm.services.shared.settings import ServiceSettings, served_name


class DetokenizerSettings(ServiceSettings):
    """Turns token ids into text for gateways."""

    port: int = Field(7002, ge=1, le=65535, description="gRPC port.")
    metrics_host: str = Field("127.0.0.1", description="Listen address of the metrics port.")
    metrics_port: int = Field(9102, ge=1, le=65535, description="Port of GET /metrics.")
    model: Path = Field(description="Folder of the Hugging Face model. Only its tokenizer files are read.")
    served_model_name: str = Field("", description="Model name that clients use. Empty: the name of the model folder.")
    max_open_requests: int = Field(
        65536, ge=1, description="Largest number of open requests per stream. A stream that opens more is ended."
    )
    inline_tokens: int = Field(
        2048,
        ge=0,
        description="Largest number of tokens in a message that the event loop decodes. A thread decodes longer messages.",
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
