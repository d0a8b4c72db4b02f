"""What an endpoint makes of a request's choices: the port between the exchange and each API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from services.gateway.request.errors import ApiError
from services.gateway.request.request import Delta


class Renderer(Protocol):
    """One request's answer, for one endpoint."""

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        """The whole answer; `deltas` are all choices, by index. Raises ApiError."""


@runtime_checkable
class StreamRenderer(Renderer, Protocol):
    """Of an endpoint that can stream. What it gives are complete events."""

    async def chunk(self, delta: Delta) -> bytes:
        """Raises ApiError."""

    async def ending(self) -> bytes:
        """What comes behind all chunks. Raises ApiError."""

    def failure(self, error: ApiError) -> bytes:
        """In place of what was still to come."""
