"""The bodies of OpenAI's files and batches. They validate and document.

Source: OpenAI's API reference, /v1/files and /v1/batches.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.shared import limits

EXPIRY_S = (3600, 30 * 86_400)

File = Annotated[Any, WithJsonSchema({"type": "string", "format": "binary"})]
# Checked by hand.
Metadata = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]})
]
LineEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score"]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRY_S[0], le=EXPIRY_S[1])


class FileForm(Body):
    """Fields of a multipart form. `expires_after` comes as expires_after[anchor] and expires_after[seconds]."""

    file: File = Field(description="JSONL: a request a line.")
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = Field(
        None, description="Time until the file is deleted. Default: the server's limit for unused files."
    )


class BatchRequest(Body):
    input_file_id: str = Field(max_length=limits.MAX_STORED_ID_CHARS)
    endpoint: LineEndpoint = Field(description="Path of all lines.")
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,5}[smhd]$", description="24h, or another time up to seven days, such as 30m; then it expires."
    )
    metadata: Metadata = Field(None, description="Up to 16 names and texts.")
    output_expires_after: ExpiresAfter | None = Field(None, description="Time until the files of results are deleted.")
