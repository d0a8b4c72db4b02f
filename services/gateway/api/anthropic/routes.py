"""Anthropic's routes."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from fastapi import FastAPI, Request, Response

from services.gateway.api.anthropic.call import MessagesCall
from services.gateway.api.anthropic.errors import ANTHROPIC
from services.gateway.api.anthropic.operations import COUNT_TOKENS, MESSAGES, OPERATIONS
from services.gateway.api.chat_preparer import ChatPreparer
from services.gateway.http.answer import HttpPort, endpoint_of
from services.gateway.request.errors import AnswerForm
from services.gateway.request.origin import origin_of
from services.gateway.service.sink import MakeOperation, Operation


class MessagesApi:
    """One per process."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {MESSAGES: ANTHROPIC, COUNT_TOKENS: ANTHROPIC}

    def __init__(self, port: HttpPort, preparer: ChatPreparer) -> None:
        self._port = port
        self._preparer = preparer

    def add_routes(self, app: FastAPI) -> Mapping[str, MakeOperation]:
        """Returns what generates, by path."""

        def messages() -> Operation:
            call = MessagesCall(self._preparer)
            return Operation(call.prepare, call.renderer)

        app.post(MESSAGES)(endpoint_of(self._port, messages))

        @app.post(COUNT_TOKENS)
        async def count_tokens(request: Request) -> Response:
            return Response(orjson.dumps({"input_tokens": await self._count(request)}), media_type="application/json")

        return {MESSAGES: messages}

    async def _count(self, request: Request) -> int:
        """Raises ApiError."""
        state = request.scope["state"]
        async with self._port.bodies.read(request.scope, request.receive) as body:
            return await MessagesCall(self._preparer).count(body, origin_of(state))
