"""What an endpoint makes of a request's choices: the port between the exchange and each API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from services.gateway.request.errors import ApiError
from services.gateway.request.request import Delta

DONE = b"data: [DONE]\n\n"


def sse_error(error: ApiError) -> bytes:
    return b"data: " + error.json() + b"\n\n"


class Renderer(Protocol):
    """One request's answer, for one endpoint."""

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        """The whole answer; `deltas` are all choices, by index. Raises ApiError."""


@runtime_checkable
class StreamRenderer(Renderer, Protocol):
    """Of an endpoint that can stream. Chunks are complete events."""

    async def chunk(self, delta: Delta) -> bytes:
        """Raises ApiError."""

    def usage_chunk(self) -> bytes: ...
