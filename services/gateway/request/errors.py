"""Every failure a client can see is an ApiError: an HTTP status and OpenAI's error body. Messages hold no prompt text."""

from __future__ import annotations

import re
from typing import Any

import orjson

from rootstock.v1 import common_pb2 as pb
from services.gateway.request import client_fields
from services.gateway.request.client_fields import ClientFields

MAX_DETAIL_CHARS = 500  # of a message that another service wrote
CLIENT_CLOSED = 499  # nobody reads it: a label of metrics and logs
_NAMED_FIELD = re.compile(r"([a-z][a-z_.]*)(?:\[\d+\]|, position \d+)?: ")
_TYPES = {401: "authentication_error", 408: "timeout_error", 504: "timeout_error"}


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

    def headers(self) -> list[tuple[bytes, bytes]]:
        """ASGI headers of a plain HTTP answer with this error."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.json()))]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code or "invalid_value")


def unknown_model() -> ApiError:
    return ApiError(404, "The model does not exist on this server; see /v1/models.", param="model", code="model_not_found")


def context_length_exceeded(param: str, context_len: int, prompt_tokens: int) -> ApiError:
    message = (
        f"This model's maximum context length is {context_len} tokens, and the prompt has {prompt_tokens}. "
        "At least one token must be left for the answer."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unavailable(message: str, retry_after_s: int, code: str = "service_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def timed_out(message: str = "The request took longer than this server allows.") -> ApiError:
    return ApiError(504, message, code="timeout")


def internal(message: str = "Internal server error.") -> ApiError:
    return ApiError(500, message, code="internal_error")


def from_worker(code: int, message: str, retry_after_s: int, names: ClientFields, grammar_field: str | None = None) -> ApiError:
    """The client's error for a Finish with reason ABORT. names: the client's, of its fields. grammar_field: the one that gave
    the grammar, if one did."""
    text = message[:MAX_DETAIL_CHARS]
    if code == pb.ERROR_CODE_INVALID_ARGUMENT:
        return _refused(text, names, grammar_field)
    if code == pb.ERROR_CODE_OUT_OF_MEMORY:
        return bad_request(None, text or "The request does not fit the KV pool.", "out_of_memory")
    if code == pb.ERROR_CODE_QUEUE_FULL:
        return unavailable("The queue is full.", retry_after_s, "queue_full")
    if code == pb.ERROR_CODE_TIMEOUT:
        return timed_out(text or "The request took longer than the worker allows.")
    if code == pb.ERROR_CODE_UNAVAILABLE:
        return unavailable("The worker is going away.", retry_after_s)
    if code == pb.ERROR_CODE_OTHER_WEIGHTS:
        return unavailable("The worker has got other weights.", retry_after_s)
    if code == pb.ERROR_CODE_CANCELLED:
        return unavailable("The request was cancelled on the worker.", retry_after_s, "cancelled")
    return internal(text or "The worker failed to compute this request.")


def _refused(message: str, names: ClientFields, grammar_field: str | None) -> ApiError:
    """Workers begin the message of a refusal with the name of the field, where there is one; a grammar's with its kind."""
    named = _NAMED_FIELD.match(message)
    if named is None:
        return bad_request(None, message or "The worker refused the request.")
    if grammar_field is not None and named[1] in client_fields.GRAMMAR:
        return bad_request(grammar_field, message)
    own = names.of(named[1])
    return bad_request(own, own + message[named.end(1) :])
