"""Renders files and batches as JSON objects of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rootstock_llm.services.gateway.store.batch_record import BatchRecord, BatchStatus
from rootstock_llm.services.gateway.store.stored_files import StoredFile

Json = dict[str, Any]

_TIMES = (  # statuses with a time field in the batch: the time at which the batch reached the status
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.COMPLETED,
    BatchStatus.FAILED,
    BatchStatus.EXPIRED,
    BatchStatus.CANCELLING,
    BatchStatus.CANCELLED,
)


def file_card(file: StoredFile) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_card(record: BatchRecord) -> Json:
    """Returns the JSON object of a batch.

    The object names the output and error files only if they are not empty and the batch has ended.
    """
    order, used = record.order, record.usage
    return {
        "id": order.id,
        "object": "batch",
        "endpoint": order.endpoint,
        "errors": {"object": "list", "data": record.errors} if record.errors else None,
        "input_file_id": order.input_file_id,
        "completion_window": order.window,
        "status": record.status.value,
        "output_file_id": order.output_id if record.output_bytes and not record.is_open else None,
        "error_file_id": order.error_id if record.error_bytes and not record.is_open else None,
        "created_at": order.created_at,
        "expires_at": order.expires_at,
        **{f"{status.value}_at": record.times.get(status) for status in _TIMES},
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "usage": {
            "input_tokens": used["input_tokens"],
            "input_tokens_details": {"cached_tokens": used["cached_tokens"]},
            "output_tokens": used["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": used["reasoning_tokens"]},
            "total_tokens": used["input_tokens"] + used["output_tokens"],
        },
        "model": record.model or None,
        "metadata": order.metadata,
    }


def list_of(cards: Sequence[Json], has_more: bool) -> Json:
    ends = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
    return {"object": "list", "data": list(cards), "first_id": ends[0], "last_id": ends[1], "has_more": has_more}
