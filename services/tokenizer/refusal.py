"""The way a request is refused: a gRPC status and a message that names the field and holds no prompt text."""

from __future__ import annotations

import grpc


class Refusal(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, message)


def too_much(message: str) -> Refusal:
    return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def busy(message: str) -> Refusal:
    """It may be taken later."""
    return Refusal(grpc.StatusCode.ABORTED, message)
