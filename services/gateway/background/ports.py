"""The ports of background responses: the API that they belong to, and the service that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.choice import Delta
from services.gateway.request.errors import ApiError
from services.gateway.request.request import RunningRequest
from services.gateway.service.sink import Prepare
from services.gateway.state.background_record import BackgroundOrder, BackgroundStatus, Kept, Stored

Json = dict[str, Any]


class Story(Protocol):
    """Renders the events of one response from where its stored events end."""

    def restore(self, events: Sequence[bytes], texts: Sequence[str]) -> None:
        """Receives one page of stored events, and the texts that they were made of. Called for each page, before all else."""

    def begins(self) -> list[bytes]:
        """Returns the events for a response that a worker has begun."""

    async def of(self, delta: Delta) -> list[bytes]:
        """Returns the events of the next delta. Raises ApiError."""

    def ending(self) -> tuple[Json, list[bytes]]:
        """Returns the response and its last events. Called after the last delta."""


class Answers(Protocol):
    def prepare(self, stored: Stored) -> Prepare:
        """Returns a function that prepares the request as it was prepared first, with the prompt that is stored."""

    def story(self, stored: Stored, running: RunningRequest, token_texts: ModelTexts) -> Story:
        """Returns the story of a stored response, which needs restore() before it goes on."""

    async def record(self, order: BackgroundOrder, response: Json) -> Kept:
        """Returns the record of a complete response. Raises ApiError; 404 if the response was deleted."""

    async def given_up(self, owner: str, response_id: str) -> bytes:
        """Returns the record of a response that no gateway could read or end, as a failed one.

        Raises:
            ApiError: 404: the response was deleted.
            ValueError, TypeError, LookupError: Its record cannot be read.
        """

    async def concluded(self, stored: Stored, status: BackgroundStatus, error: ApiError | None) -> tuple[Json, list[bytes]]:
        """Returns a response that ends with what is stored, and its last events. error: of a failed one. Raises ApiError."""
