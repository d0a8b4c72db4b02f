"""The gateway's settings: one frozen object, filled from flags, then environment, then these defaults."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from services.shared.limits import MAX_BODY_BYTES
from services.shared.settings import ServiceSettings


def _split_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]


class GatewaySettings(ServiceSettings):
    """Metrics are on the HTTP port, at /metrics."""

    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP API. 0 takes a free one.")
    health_port: int = Field(7000, ge=0, le=65535, description="Port of the gRPC health service.")
    tokenizers: CommaSeparated = Field(
        ("127.0.0.1:7001",), min_length=1, description="Addresses of tokenizers: comma separated host:port."
    )
    detokenizers: CommaSeparated = Field(
        ("127.0.0.1:7002",), min_length=1, description="Addresses of detokenizers: comma separated host:port."
    )
    workers: CommaSeparated = Field(
        ("127.0.0.1:7003",), min_length=1, description="Addresses of workers: comma separated host:port."
    )
    model_name: str = Field("", description="Name that clients know the model by. Empty: what the worker says.")
    api_keys: CommaSeparated = Field((), repr=False, description="Accepted bearer tokens, comma separated. Empty: no check.")
    admin_host: str = Field(
        "127.0.0.1", description="Address that the operators' HTTP API listens on; others than loopback need control_token."
    )
    admin_port: int = Field(0, ge=0, le=65535, description="Port of the operators' HTTP API; 0: none.")
    worker_control_addresses: CommaSeparated = Field(
        (), description="Addresses of the workers' control services: comma separated host:port."
    )
    control_token: str = Field(
        "", repr=False, description="Token of the operators' HTTP API and of the workers' control services; empty: none."
    )
    control_token_file: str = Field("", description="File that holds the operators' token, instead of control_token.")
    control_timeout_s: float = Field(60.0, gt=0, description="Seconds that an operation may take on a worker, waiting included.")
    max_concurrent_requests: int = Field(2048, ge=1, description="Generation requests in flight; one more gets 503.")
    max_waiting_requests: int = Field(1024, ge=0, description="Choices that may wait for a worker to connect; one more gets 503.")
    wait_for_worker_s: float = Field(10.0, ge=0, description="Seconds that a request waits for a worker to connect, then 503.")
    wait_for_detokenizer_s: float = Field(10.0, ge=0, description="Seconds that a request waits for a detokenizer, then 503.")
    tokenize_timeout_s: float = Field(10.0, gt=0, description="Deadline of tokenizing one request, in seconds, retries included.")
    body_timeout_s: float = Field(60.0, gt=0, description="Seconds in which a request's body must have arrived, then 408.")
    request_timeout_s: float = Field(600.0, gt=0, description="Seconds from a request's arrival to its last byte, then 504.")
    retry_after_s: int = Field(1, ge=1, description="Retry-After of a 503, in seconds.")
    max_body_bytes: int = Field(MAX_BODY_BYTES, ge=1, le=MAX_BODY_BYTES, description="Largest body of an HTTP request, in bytes.")
