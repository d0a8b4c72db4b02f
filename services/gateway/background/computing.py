"""A request of nobody that waits: through the same exchange as all others, without a connection."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.types import Message, Receive

from services.gateway.background.ports import MakeNarrator
from services.gateway.http.exchange import Exchange, Generator
from services.gateway.http.renderer import Admitted, Narrator, Prepare
from services.gateway.peers.token_texts import ModelTexts
from services.gateway.request.bodies import ReceivedBody
from services.gateway.request.caller import Caller
from services.gateway.request.errors import OPENAI, ApiError
from services.gateway.request.generation import Plan
from services.gateway.request.origin import Origin
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
        access = self._generator.access

        def narrator(request: ClientRequest, _created: int, _model: str, texts: ModelTexts) -> Narrator:
            return make(request, texts)

        async def routed(body: ReceivedBody, origin: Origin) -> Plan:
            """A body's key may be anything, a header's may not."""
            return (await prepare(body, origin)).routed(order.routing_key)

        exchange = Exchange(self._generator, routed, narrator, admission, failures.append)
        begun = False

        async def served() -> None:
            nonlocal begun
            begun = True
            scope, began = _scope(order, caller), time.monotonic()
            try:
                await exchange(scope, _silent_client(), _unsent)
            finally:
                status = failures[0].status if failures else 200
                access.ended("background", "POST", scope["path"], scope["state"], status, 0, time.monotonic() - began)

        try:
            # A task of its own: an exchange that is interrupted cancels the one that it is in.
            await asyncio.create_task(served())
        finally:
            if admission is not None and not begun:
                admission.end(0)
        return failures[0] if failures else None


def _scope(order: BackgroundOrder, caller: Caller) -> dict[str, Any]:
    headers = [(b"content-length", b"0")]
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
