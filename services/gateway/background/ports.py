"""The interfaces by which an API renders the events and records of its background responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rootstock_llm.services.gateway.generation.choice import Delta
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.service.sink import Prepare
from rootstock_llm.services.gateway.store.background_record import BackgroundOrder, BackgroundStatus, FinalRecords, Stored

Json = dict[str, Any]


class EventRenderer(Protocol):
    """Renders the events of one response that follow its stored events."""

    def restore(self, events: Sequence[bytes], texts: Sequence[str]) -> None:
        """Restores the state from a page of stored events or texts. Called for all stored pages before any other method."""

    def begins(self) -> list[bytes]:
        """Returns the events to send when a worker starts to compute the response."""

    async def of(self, delta: Delta) -> list[bytes]:
        """Returns the events of the next delta. Raises ApiError."""

    def ending(self) -> tuple[Json, list[bytes]]:
        """Returns the response and its last events. Called after the last delta."""


class Answers(Protocol):
    """The API whose responses run in the background."""

    def prepare(self, stored: Stored) -> Prepare:
        """Returns a function that prepares the stored request with the stored prompt."""

    def event_renderer(self, stored: Stored, running: RunningRequest, token_texts: TokenTexts) -> EventRenderer:
        """Returns the renderer of a stored response. The caller then passes all stored pages to restore()."""

    async def record(self, order: BackgroundOrder, response: Json) -> FinalRecords:
        """Returns the record of a complete response. Raises ApiError; 404 if the response was deleted."""

    async def given_up(self, owner: str, response_id: str) -> bytes:
        """Returns the record, with status failed, of a response that no gateway could read or end.

        Raises:
            ApiError: Status 404 if the response was deleted.
            ValueError, TypeError, LookupError: The response's record cannot be read.
        """

    async def concluded(self, stored: Stored, status: BackgroundStatus, error: ApiError | None) -> tuple[Json, list[bytes]]:
        """Returns a response that ends now with its stored output, and the last events of the response.

        Args:
            error: The failure of a failed response; otherwise None.

        Raises:
            ApiError: The record cannot be made.
        """
