"""One response as it comes: what is told of it, whatever API it is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.request.request import Delta

Json = dict[str, Any]


class Story(Protocol):
    """As the events of its stream. Of what is stored of it, what follows is told."""

    def restore(self, events: Sequence[bytes], texts: Sequence[str]) -> None:
        """Behind these events, which came of these texts. Before all else, for each page of what is stored."""

    def begins(self) -> list[bytes]:
        """A worker has it."""

    async def of(self, delta: Delta) -> list[bytes]:
        """Of its deltas in turn. Raises ApiError."""

    def ending(self) -> tuple[Json, list[bytes]]:
        """The response, and the last events. Behind the last delta."""
