"""Every failure a client can see is an ApiError: an HTTP status and OpenAI's error body, or what another API's form makes of it.
Messages hold no prompt text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

MAX_DETAIL_CHARS = 500  # of a message that another service wrote
DONE = b"data: [DONE]\n\n"
KEY_NOT_HERE = "api_key_not_here"  # yet: the code of an error that passes
CLIENT_CLOSED = 499  # nobody reads it: a label of metrics and logs
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}

Headers = list[tuple[bytes, bytes]]


class ApiError(Exception):
    """A request's one failure. `param` is the request's field that is wrong, if one is. `retry_after_s` becomes a header."""

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
        """ASGI headers of a plain HTTP answer with this error. num_bytes: of its body, if that is not json()."""
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
    """prompt_tokens: their number, in words where it is a bound."""
    message = (
        f"This model's maximum context length is {context_len} tokens, and the prompt has {prompt_tokens}. "
        "At least one token must be left for the answer."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unavailable(message: str, retry_after_s: int, code: str = "service_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def key_not_here() -> ApiError:
    return unavailable("The API key has not come to this gateway yet.", 1, KEY_NOT_HERE)


def timed_out(message: str = "The request took longer than this server allows.") -> ApiError:
    return ApiError(504, message, code="timeout")


def internal(message: str = "Internal server error.") -> ApiError:
    return ApiError(500, message, code="internal_error")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How an API writes what is no result. body: of an error, of a request of this id. status: the API's for an error's own.
    event: the name of a stream's event that tells an error, empty for none. comment: what is sent where a stream is silent for a
    while. id_header: one more that has the request's id, empty for none."""

    body: Callable[[ApiError, str], dict[str, Any]]
    status: Callable[[int], int]
    event: bytes
    comment: bytes
    id_header: bytes = b""

    def answer(self, error: ApiError, request_id: str) -> tuple[int, Headers, bytes]:
        """A plain HTTP answer: status, headers, body."""
        body = orjson.dumps(self.body(error, request_id))
        return self.status(error.status), error.headers(len(body)), body

    def event_of(self, error: ApiError, request_id: str) -> bytes:
        """A stream's last event."""
        name = b"event: %s\n" % self.event if self.event else b""
        return b"%sdata: %s\n\n" % (name, orjson.dumps(self.body(error, request_id)))


def _own(error: ApiError, _request_id: str) -> dict[str, Any]:
    return error.body()


OPENAI = AnswerForm(_own, lambda status: status, b"", b": waiting\n\n")
