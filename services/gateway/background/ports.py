"""What the background knows of the API whose responses it has made, and of those who compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.gateway.background.story import Json, Story
from services.gateway.http.renderer import Admitted, Narrator, Prepare
from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.caller import Caller
from services.gateway.request.errors import ApiError
from services.gateway.request.request import ClientRequest
from services.gateway.state.background_record import BackgroundOrder, Kept, Status, Stored

MakeNarrator = Callable[[ClientRequest, ModelTexts], Narrator]


class Computer(Protocol):
    async def compute(
        self, order: BackgroundOrder, caller: Caller, prepare: Prepare, make: MakeNarrator, admission: Admitted | None
    ) -> ApiError | None:
        """A request of nobody that waits, from its admission to its last token. admission: that it has already; it has ended
        afterwards. Returns why it has not come to its end."""


class Answers(Protocol):
    def prepare(self, stored: Stored) -> Prepare:
        """As it was prepared at first, with the prompt that is stored."""

    def story(self, stored: Stored, request: ClientRequest, token_texts: ModelTexts) -> Story:
        """Goes on where the stored events end, once it has been told of them."""

    async def record(self, order: BackgroundOrder, response: Json) -> Kept:
        """What is kept of a response that is over. Raises ApiError, of one that is gone too: 404."""

    async def given_up(self, owner: str, response_id: str) -> bytes:
        """The record of a response that is kept, and that nobody can read or end, as one that has failed. Raises ApiError, of
        one that is gone: 404; and ValueError, TypeError or LookupError where its record cannot be read."""

    async def concluded(self, stored: Stored, status: Status, error: ApiError | None) -> tuple[Json, list[bytes]]:
        """A response that ends with what is stored, and its last events. error: of one that failed. Raises ApiError."""
