"""The detokenizer's settings: flags, environment (ROOTSTOCK_*), defaults."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.shared.served_name import served_name
from services.shared.settings import ServiceSettings


class DetokenizerSettings(ServiceSettings):
    """Turns token ids into text for gateways."""

    port: int = Field(7002, ge=1, le=65535, description="gRPC port.")
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on.")
    metrics_port: int = Field(9102, ge=1, le=65535, description="Port of GET /metrics.")
    model: Path = Field(description="Folder of a Hugging Face model; only its tokenizer files are read.")
    served_model_name: str = Field("", description="Name that clients use; by default the model folder's own name.")
    max_open_requests: int = Field(65536, ge=1, description="Requests that one stream may have open; more end the stream.")
    inline_tokens: int = Field(
        2048, ge=0, description="Tokens of one message up to which it is decoded on the event loop; longer ones go to a thread."
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
