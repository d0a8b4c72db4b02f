"""The error of a refused request."""

from __future__ import annotations

import grpc


class Refusal(Exception):
    """A request is refused with a gRPC status. The message names the field and contains no text of the prompt."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)


def too_much(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def busy(message: str) -> Refusal:
    """Returns a refusal for a request that may succeed later."""
    return Refusal(grpc.StatusCode.ABORTED, message)
