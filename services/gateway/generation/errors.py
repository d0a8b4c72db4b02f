"""Errors that clients see. An ApiError has an HTTP status and OpenAI's error body; an AnswerForm renders it for another API.

Messages never contain text of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

MAX_DETAIL_CHARS = 500  # limit of the part of another service's message that an error repeats
DONE = b"data: [DONE]\n\n"
KEY_NOT_HERE = "api_key_not_here"  # code of a temporary error: the gateway does not have the API key yet
CLIENT_CLOSED = 499  # status in metrics and logs if the client has closed its connection
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """A code of an error, as docs/reference/api.md and /openapi.json describe it."""

    statuses: tuple[int, ...]  # HTTP statuses; Messages has 529 in place of 503; empty for a code inside a batch
    meaning: str  # cause of the error, as a sentence
    remedy: str  # advice for the client, as a sentence


_WAIT = "Send the request again after `Retry-After`."
_CORRECT = "Correct the request; without a change it fails again."
_LATER = "Send the request again."
# Every code that an ApiError has.
CODES: Mapping[str, ErrorCode] = MappingProxyType(
    {
        "aborted": ErrorCode(
            (400,), "An abort ended the request before it had any output.", "Send it again, unless you sent the abort."
        ),
        "api_key_expired": ErrorCode((401,), "The API key has expired.", "Ask the operator for a new key."),
        "api_key_not_here": ErrorCode((503,), "This gateway does not know the API key yet.", _WAIT),
        "background_full": ErrorCode(
            (429,), "The API key has too many unfinished background responses.", "Wait until one has ended."
        ),
        "bad_http": ErrorCode(
            (400,), "The bytes on the connection are not HTTP/1.1.", "Correct the client; the connection is closed."
        ),
        "batch_not_cancellable": ErrorCode((409,), "The batch has ended.", "Read its result."),
        "batch_not_found": ErrorCode((404,), "No batch has this id, or it has expired.", "Create it again."),
        "being_cancelled": ErrorCode((503,), "The response was cancelled, but its generation has not ended yet.", _WAIT),
        "body_budget": ErrorCode((503,), "No memory for the body was free within `--body-wait-s`.", _WAIT),
        "cancelled": ErrorCode((503,), "A worker cancelled the request.", _WAIT),
        "context_length_exceeded": ErrorCode(
            (400,), "The prompt does not fit the context.", "Shorten it, or ask for fewer tokens."
        ),
        "conversation_locked": ErrorCode((409,), "Other requests changed the conversation at every attempt.", _LATER),
        "conversation_not_found": ErrorCode((404,), "No conversation has this id, or it has expired.", "Create it again."),
        "file_in_use": ErrorCode((409,), "An unfinished batch uses the file.", "Wait for the batch, or cancel it."),
        "file_not_found": ErrorCode((404,), "No file has this id, or it has expired.", "Upload it again."),
        "file_too_large": ErrorCode((413,), "The file is larger than `--max-file-bytes`.", "Split the file."),
        "forbidden": ErrorCode((403,), "Only operators may do this.", "Use the admin port, with its token."),
        "head_too_large": ErrorCode(
            (431,), "The request line and the headers are larger than 64 KiB.", "Send fewer or shorter headers."
        ),
        "internal_error": ErrorCode(
            (500,), "An internal error occurred.", "Send the request again; if it fails again, report its `x-request-id`."
        ),
        "invalid_api_key": ErrorCode((401,), "The API key is missing, unknown or not valid.", "Send a valid key."),
        "invalid_encrypted_content": ErrorCode((400,), "`encrypted_content` is not from this server.", "Leave the field out."),
        "invalid_form": ErrorCode((400,), "The body is not a valid multipart form with a file.", _CORRECT),
        "invalid_json": ErrorCode((400,), "The body is not JSON; the message gives line, column and reason.", _CORRECT),
        "invalid_token": ErrorCode(
            (401,), "The request to the admin port has no valid token.", "Send `Authorization: Bearer TOKEN`."
        ),
        "invalid_value": ErrorCode((400,), "A field has a wrong type or value; `param` names it.", _CORRECT),
        "item_not_found": ErrorCode((404,), "No item has this id.", "List the items."),
        "lease_lost": ErrorCode((503,), "Another gateway continues the background response.", "None; the response continues."),
        "method_not_allowed": ErrorCode(
            (405,), "The path does not support this method; `Allow` lists the supported methods.", _CORRECT
        ),
        "missing_required_parameter": ErrorCode((400,), "A required field is missing; `param` names it.", _CORRECT),
        "model_not_allowed": ErrorCode((403,), "The API key may not use this model.", "Use a name that `/v1/models` lists."),
        "model_not_found": ErrorCode((404,), "No model has this name.", "Use a name that `/v1/models` lists."),
        "model_replaced": ErrorCode((503,), "The model is being replaced by another model.", _WAIT),
        "no_store": ErrorCode(
            (400,),
            "The server has no store for responses, files and batches.",
            "Send the whole history, or ask the operator for a store.",
        ),
        "no_worker": ErrorCode((503,), "No worker of the model is connected, or no connected worker supports scores.", _WAIT),
        "not_found": ErrorCode((404,), "The path does not exist, or no object has this id.", _CORRECT),
        "out_of_memory": ErrorCode(
            (400,), "The request is larger than the KV pool of a worker.", "Shorten the prompt, or ask for fewer tokens."
        ),
        "paused": ErrorCode((503,), "An operator has paused all workers of the model.", _WAIT),
        "previous_response_failed": ErrorCode(
            (400,), "The response that `previous_response_id` names has failed.", "Name an earlier response."
        ),
        "previous_response_not_finished": ErrorCode(
            (400,), "The response that `previous_response_id` names has not ended.", "Wait for it, or cancel it."
        ),
        "previous_response_not_found": ErrorCode(
            (404,), "The response that `previous_response_id` names is not stored.", "Send the whole history."
        ),
        "queue_full": ErrorCode((503,), "Too many requests are open or wait for a worker.", _WAIT),
        "queue_timeout": ErrorCode((503,), "No worker took the request within `--queue-timeout-s`.", _WAIT),
        "rate_limit_exceeded": ErrorCode((429,), "A limit of the API key is reached.", _WAIT),
        "request_too_large": ErrorCode((413,), "The body, or a text in it, is too large.", "Send a smaller request."),
        "response_not_found": ErrorCode((404,), "No response has this id, or it has expired.", "Create it again."),
        "response_too_large": ErrorCode((400,), "The response is larger than the store allows.", "Ask for fewer tokens."),
        "service_unavailable": ErrorCode(
            (503,), "A service that the request needs has no free capacity or is not connected.", _WAIT
        ),
        "session_not_found": ErrorCode((404,), "No session has this id, or it has ended.", "Open a session."),
        "session_refused": ErrorCode(
            (400,), "The worker cannot open the session.", "Close other sessions, or request a smaller capacity."
        ),
        "session_unavailable": ErrorCode(
            (503,), "The worker of the session is not connected, or has new weights.", "Open a new session."
        ),
        "shutting_down": ErrorCode((503,), "This gateway is stopping.", _WAIT),
        "store_full": ErrorCode((400, 429), "The API key has reached its limit in the store.", "Delete stored objects."),
        "store_unavailable": ErrorCode((503,), "The store cannot be reached.", _WAIT),
        "stream_expired": ErrorCode(
            (400,), "The events of the response are no longer stored.", "Read the response without `stream`."
        ),
        "streams_full": ErrorCode(
            (429,), "The API key has too many streams of background responses.", "Wait until a stream ends."
        ),
        "timeout": ErrorCode(
            (408, 504),
            "408: the headers or the body did not arrive in time. 504: the request took too long.",
            "Send it again, or ask for fewer tokens.",
        ),
        "too_many_connections": ErrorCode((503,), "The gateway has its largest number of connections.", _WAIT),
        "unsupported_endpoint": ErrorCode((400,), "The path is not served yet.", "Use the path that the message names."),
        "unsupported_model": ErrorCode(
            (400,), "The model does not support this: it generates no text, or returns no vectors.", "Use another model."
        ),
        "unsupported_operation": ErrorCode((400,), "The response is not a background response.", _CORRECT),
        "unsupported_parameter": ErrorCode(
            (400,), "This server does not support the field or its value; `param` names it.", "Leave the field out."
        ),
        "weights_not_served": ErrorCode(
            (503,), "No worker has the weights with which the response began.", "Send the request again for a new response."
        ),
        "worker_lost": ErrorCode((503,), "The worker was lost, and no other worker could continue.", _WAIT),
        "worker_not_found": ErrorCode((404,), "Admin port: no worker has this name.", "Use a name that the message lists."),
        "worker_unknown": ErrorCode(
            (409,), "Admin port: this gateway does not know the id of the worker yet.", "Name the worker by its id."
        ),
    }
)
# Codes in the `errors` of a batch, and in the result of a line that was not executed.
BATCH_CODES: Mapping[str, ErrorCode] = MappingProxyType(
    {
        "batch_cancelled": ErrorCode(
            (), "The batch was cancelled before the line was executed.", "Send the line in another batch."
        ),
        "batch_expired": ErrorCode(
            (), "The completion window ended before the line was executed.", "Send the line in another batch."
        ),
        "duplicate_custom_id": ErrorCode((), "Two lines have the same `custom_id`.", "Correct the file."),
        "empty_file": ErrorCode((), "The file has no lines.", "Correct the file."),
        "input_file_gone": ErrorCode((), "The input file does not exist any more.", "Upload it again."),
        "invalid_body": ErrorCode((), "`body` is not an object.", "Correct the file."),
        "invalid_custom_id": ErrorCode((), "`custom_id` is not a string of the allowed length.", "Correct the file."),
        "invalid_json_line": ErrorCode((), "The line is not a JSON object.", "Correct the file."),
        "invalid_method": ErrorCode((), "`method` is not POST.", "Correct the file."),
        "line_too_large": ErrorCode((), "The line is larger than 4 MiB.", "Shorten it."),
        "mismatched_endpoint": ErrorCode((), "`url` is not the endpoint of the batch.", "Correct the file."),
        "result_too_large": ErrorCode((), "The response of the line is larger than 8 MiB.", "Ask for fewer tokens."),
        "server_error": ErrorCode((), "The line could not be executed.", "Send the line in another batch."),
        "store_full": ErrorCode((), "The API key has reached its limit in the store.", "Delete stored objects."),
        "too_many_lines": ErrorCode((), "The file has more lines than `--max-batch-lines`.", "Split the file."),
    }
)


class ApiError(Exception):
    """The failure of a request.

    `param` is the invalid field of the request, or None. `retry_after_s` becomes the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        assert code is None or status in CODES[code].statuses, f"CODES has no status {status} for the code {code}"
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        return orjson.dumps(self.body())

    def headers(self, num_bytes: int | None = None) -> Headers:
        """Returns the ASGI headers of a plain HTTP response. `num_bytes` is the size of the body; None for the body json()."""
        length = len(self.json()) if num_bytes is None else num_bytes
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code or "invalid_value")


def unknown_model() -> ApiError:
    return ApiError(404, "The model does not exist on this server; see /v1/models.", param="model", code="model_not_found")


def model_not_allowed() -> ApiError:
    return ApiError(403, "The API key may not use this model; see /v1/models.", param="model", code="model_not_allowed")


def context_length_exceeded(param: str, context_len: int, prompt_tokens: str) -> ApiError:
    """Returns the error of a prompt that exceeds the context.

    Args:
        prompt_tokens: Number of tokens, or a phrase such as "more than 9000".
    """
    message = (
        f"This model's maximum context length is {context_len} tokens, and the prompt has {prompt_tokens}. "
        "At least one token must be left for the output."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unavailable(message: str, retry_after_s: int, code: str = "service_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def key_not_here() -> ApiError:
    return unavailable(
        "This gateway does not know the API key yet. A new key reaches every gateway within 120 s; retry later.", 1, KEY_NOT_HERE
    )


def timed_out(message: str = "The request took longer than this server allows.") -> ApiError:
    return ApiError(504, message, code="timeout")


def internal(message: str = "Internal server error.") -> ApiError:
    return ApiError(500, message, code="internal_error")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an API's errors and keep-alive comments."""

    body: Callable[[ApiError, str], dict[str, Any]]  # returns the JSON body for an error and a request id
    status: Callable[[int], int]  # converts the HTTP status of an ApiError to the API's status
    event: bytes  # name of the event that reports an error in a stream; b"" for an event without a name
    comment: bytes  # comment that a silent stream sends
    id_header: bytes = b""  # name of a second header with the request id, besides x-request-id; b"" for none

    def answer(self, error: ApiError, request_id: str) -> tuple[int, Headers, bytes]:
        """Returns status, headers and body of a plain HTTP response."""
        body = orjson.dumps(self.body(error, request_id))
        return self.status(error.status), error.headers(len(body)), body

    def event_of(self, error: ApiError, request_id: str) -> bytes:
        """Returns the last event of a failed stream."""
        name = b"event: %s\n" % self.event if self.event else b""
        return b"%sdata: %s\n\n" % (name, orjson.dumps(self.body(error, request_id)))


def _own(error: ApiError, _request_id: str) -> dict[str, Any]:
    return error.body()


OPENAI = AnswerForm(_own, lambda status: status, b"", b": waiting\n\n")
