"""OpenAI's files and batches as the OpenAPI document has them."""

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
_FILE = {"file_id": "Of a file that is kept."}
_BATCH = {"batch_id": "Of a batch."}
_KEPT = (404, 503)
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
    ApiOperation("get", FILES, _TAG, "Files, the newest first", {JSON: FileList}, statuses=(503,)),
    ApiOperation("get", FILE, _TAG, "A file", {JSON: FileCard}, statuses=_KEPT, parameters=_FILE),
    ApiOperation("delete", FILE, _TAG, "Forget it", {JSON: FileDeleted}, statuses=(404, 409, 503), parameters=_FILE),
    ApiOperation("get", CONTENT, _TAG, "Its content", {BINARY: str}, statuses=_KEPT, parameters=_FILE),
    ApiOperation(
        "post",
        BATCHES,
        _TAG,
        "Begin a batch",
        {JSON: BatchCard},
        BatchRequest,
        statuses=(404, 429),
        example={"input_file_id": f"file-{'0' * 32}", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    ApiOperation("get", BATCHES, _TAG, "Batches, the newest first", {JSON: BatchList}, statuses=(503,)),
    ApiOperation("get", BATCH, _TAG, "A batch", {JSON: BatchCard}, statuses=_KEPT, parameters=_BATCH),
    ApiOperation("post", CANCEL, _TAG, "Cancel it", {JSON: BatchCard}, statuses=(404, 409, 503), parameters=_BATCH),
)
