"""Request bodies of OpenAI's files and batches, for validation and documentation.

Source: OpenAI's API reference, /v1/files and /v1/batches.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rootstock_llm.services.gateway.generation.body_fields import Body
from rootstock_llm.services.shared import limits

EXPIRY_S = (3600, 30 * 86_400)  # shortest and longest lifetime of a file, in seconds

File = Annotated[Any, WithJsonSchema({"type": "string", "format": "binary"})]
# pydantic accepts any value; check_metadata() checks it.
Metadata = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]})
]
LineEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score"]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRY_S[0], le=EXPIRY_S[1])


class FileForm(Body):
    """Fields of the form with which a client uploads a file.

    A client sends `expires_after` as the fields expires_after[anchor] and expires_after[seconds].
    """

    file: File = Field(description="JSONL with one request per line.")
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = Field(
        None, description="Time until the file is deleted. Default: the server's limit for unused files."
    )


class BatchRequest(Body):
    input_file_id: str = Field(max_length=limits.MAX_STORED_ID_CHARS)
    endpoint: LineEndpoint = Field(description="Path to which every line is sent.")
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,5}[smhd]$", description="Time until the batch expires, such as 24h or 30m. At most 7 days."
    )
    metadata: Metadata = Field(None, description="Up to 16 names with string values.")
    output_expires_after: ExpiresAfter | None = Field(None, description="Time until the output and error files are deleted.")
