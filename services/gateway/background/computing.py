"""A request of nobody that waits: through the same exchange as all others, without a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive

from services.gateway.background.ports import MakeNarrator
from services.gateway.http.exchange import ROUTING_KEY_HEADER, Exchange, Generator
from services.gateway.http.renderer import Admitted, Narrator, Prepare
from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.caller import Caller
from services.gateway.request.errors import OPENAI, ApiError
from services.gateway.request.request import ClientRequest
from services.gateway.state.background_record import BackgroundOrder


class Computing:
    """Implements Computer."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def compute(
        self, order: BackgroundOrder, caller: Caller, prepare: Prepare, make: MakeNarrator, admission: Admitted | None
    ) -> ApiError | None:
        failures: list[ApiError] = []

        def narrator(request: ClientRequest, _created: int, _model: str, texts: ModelTexts) -> Narrator:
            return make(request, texts)

        exchange = Exchange(self._generator, prepare, narrator, admission, failures.append)
        # A task of its own: an exchange that is interrupted cancels the one that it is in.
        await asyncio.create_task(exchange(_scope(order, caller), _silent_client(), _unsent))
        return failures[0] if failures else None


def _scope(order: BackgroundOrder, caller: Caller) -> dict[str, Any]:
    headers = [(b"content-length", b"0")]
    if order.routing_key:
        headers.append((ROUTING_KEY_HEADER, order.routing_key.encode()))
    state = {"request_id": order.request_id, "form": OPENAI, "caller": caller, "key": caller.key}
    return {"type": "http", "method": "POST", "path": "/v1/responses", "headers": headers, "state": state}


def _silent_client() -> Receive:
    """One that stays, and has sent an empty body."""
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive


async def _unsent(_message: Message) -> None:
    """Nobody is answered."""
