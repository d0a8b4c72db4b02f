"""Types of the responses about files and batches, for the OpenAPI document. cards.py writes the bytes."""

from __future__ import annotations

from typing import Literal

from rootstock_llm.services.gateway.api.document.answer import Count, ResponseModel

Time = int | None  # Unix seconds; null if the batch has not reached the status
BatchStatus = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class FileCard(ResponseModel):
    id: str
    object: Literal["file"]
    bytes: Count
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(ResponseModel):
    object: Literal["list"]
    data: list[FileCard]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(ResponseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(ResponseModel):
    """A fault of an input file. The first line has the number 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(ResponseModel):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(ResponseModel):
    total: Count
    completed: Count
    failed: Count


class InputDetails(ResponseModel):
    cached_tokens: Count


class OutputDetails(ResponseModel):
    reasoning_tokens: Count


class BatchUsage(ResponseModel):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class BatchCard(ResponseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: Time
    expires_at: int
    finalizing_at: Time
    completed_at: Time
    failed_at: Time
    expired_at: Time
    cancelling_at: Time
    cancelled_at: Time
    request_counts: RequestCounts
    usage: BatchUsage
    model: str | None
    metadata: dict[str, str]


class BatchList(ResponseModel):
    object: Literal["list"]
    data: list[BatchCard]
    first_id: str | None
    last_id: str | None
    has_more: bool
