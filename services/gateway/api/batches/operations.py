"""Describes the operations of OpenAI's files and batches, for the OpenAPI document."""

from __future__ import annotations

from rootstock_llm.services.gateway.api.batches.answers import BatchCard, BatchList, FileCard, FileDeleted, FileList
from rootstock_llm.services.gateway.api.batches.types import BatchRequest, FileForm
from rootstock_llm.services.gateway.api.document.operation import BINARY, FORM, JSON, ApiOperation

FILES = "/v1/files"
FILE = f"{FILES}/{{file_id}}"
CONTENT = f"{FILE}/content"
BATCHES = "/v1/batches"
BATCH = f"{BATCHES}/{{batch_id}}"
CANCEL = f"{BATCH}/cancel"

_TAG = "Batches"
_FILE = {"file_id": "Id of a stored file."}
_BATCH = {"batch_id": "Id of a batch."}
_STORED = (404, 503)
OPERATIONS = (
    ApiOperation(
        "post",
        FILES,
        _TAG,
        "Upload a file",
        {JSON: FileCard},
        FileForm,
        statuses=(429,),
        media=FORM,
        example={
            "purpose": "batch",
            "file": '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Count from 3 to 9."}}',
        },
    ),
    ApiOperation("get", FILES, _TAG, "List files, newest first", {JSON: FileList}, statuses=(503,)),
    ApiOperation("get", FILE, _TAG, "Get a file", {JSON: FileCard}, statuses=_STORED, parameters=_FILE),
    ApiOperation("delete", FILE, _TAG, "Delete a file", {JSON: FileDeleted}, statuses=(404, 409, 503), parameters=_FILE),
    ApiOperation("get", CONTENT, _TAG, "Get the content of a file", {BINARY: str}, statuses=_STORED, parameters=_FILE),
    ApiOperation(
        "post",
        BATCHES,
        _TAG,
        "Create a batch",
        {JSON: BatchCard},
        BatchRequest,
        statuses=(404, 429),
        example={"input_file_id": f"file-{'0' * 32}", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    ApiOperation("get", BATCHES, _TAG, "List batches, newest first", {JSON: BatchList}, statuses=(503,)),
    ApiOperation("get", BATCH, _TAG, "Get a batch", {JSON: BatchCard}, statuses=_STORED, parameters=_BATCH),
    ApiOperation("post", CANCEL, _TAG, "Cancel a batch", {JSON: BatchCard}, statuses=(404, 409, 503), parameters=_BATCH),
)
