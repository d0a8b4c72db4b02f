"""Base class and shared types of response bodies, for the OpenAPI document. Renderers write the bytes without these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0)]


class ResponseModel(BaseModel):
    """An object that has these members and no others."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def absent(description: str) -> Any:
    """Returns a pydantic field that a response may leave out."""
    return Field(default_factory=lambda: None, description=description)


class CachedByTier(ResponseModel):
    """Cached tokens by where their KV was: in the pool, in host memory, in the storage below it."""

    device: Count
    host: Count
    storage: Count


class Error(ResponseModel):
    """What is wrong with a request, or why it has no answer."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "timeout_error", "server_error"]
    param: str | None = Field(description="The request's field that is wrong.")
    code: str | None


class ErrorBody(ResponseModel):
    """Of every answer that is none. In a stream: its last event."""

    error: Error


class SamplingDefaultValues(ResponseModel):
    """Of parameters that a request leaves out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Health(ResponseModel):
    status: Literal["ok"]


class ReadinessReport(ResponseModel):
    ready: bool
    missing: list[Literal["worker", "tokenizer", "detokenizer", "stopping"]] = Field(description="What a request would wait for.")


class IntakeReport(ResponseModel):
    ready: bool
    missing: list[Literal["model", "stopping"]] = Field(description="Why no request is to be sent here.")
