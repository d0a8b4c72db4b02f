"""Base class and shared types of response bodies, for the OpenAPI document. Renderers write the bytes without these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]


class ResponseModel(BaseModel):
    """Base class of documented response bodies. A body has the declared members only."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def absent(description: str) -> Any:
    """Returns a pydantic field that is absent from some responses. The description names the responses with the field."""
    return Field(default_factory=lambda: None, description=description)


class CachedByTier(ResponseModel):
    """Cached prompt tokens by the tier that had their KV: device memory, host memory or storage."""

    device: Count
    host: Count
    storage: Count


class Error(ResponseModel):
    """The fault of a request, or the reason for which the server did not serve the request."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "timeout_error", "server_error"]
    param: str | None = Field(description="The invalid field of the request.")
    code: str | None


class ErrorBody(ResponseModel):
    """The body of every error response, and the data of the last event of a failed stream."""

    error: Error


class SamplingDefaultValues(ResponseModel):
    """Values of the sampling parameters for requests without these parameters."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Health(ResponseModel):
    status: Literal["ok"]


class ReadinessReport(ResponseModel):
    ready: bool
    missing: list[Literal["worker", "tokenizer", "detokenizer", "stopping"]] = Field(
        description="Services that are not connected, so that a request would wait. Only `stopping` if the gateway is stopping."
    )


class IntakeReport(ResponseModel):
    ready: bool
    missing: list[Literal["model", "stopping"]] = Field(description="Reasons for which a load balancer must not send requests.")
