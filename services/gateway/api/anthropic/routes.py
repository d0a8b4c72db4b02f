"""Routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rootstock_llm.services.gateway.api.anthropic.call import MessagesCall
from rootstock_llm.services.gateway.api.anthropic.errors import ANTHROPIC
from rootstock_llm.services.gateway.api.anthropic.operations import COUNT_TOKENS, MESSAGES, OPERATIONS
from rootstock_llm.services.gateway.api.chat import ChatPreparer
from rootstock_llm.services.gateway.generation.errors import AnswerForm
from rootstock_llm.services.gateway.generation.origin import origin_of
from rootstock_llm.services.gateway.http.answer import HttpPort, json_response
from rootstock_llm.services.gateway.service.sink import MakeOperation, Operation


class MessagesApi:
    """The routes of Anthropic's API. Each process has one instance."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {MESSAGES: ANTHROPIC, COUNT_TOKENS: ANTHROPIC}

    def __init__(self, port: HttpPort, preparer: ChatPreparer) -> None:
        self._port = port
        self._preparer = preparer

    def generating(self) -> Mapping[str, MakeOperation]:
        """Returns the generating operations by path."""
        return {MESSAGES: self._messages}

    def routes(self) -> list[Route]:
        """Returns the routes that do not generate."""
        return [Route(COUNT_TOKENS, self._count_tokens, methods=["POST"])]

    def _messages(self) -> Operation:
        call = MessagesCall(self._preparer)
        return Operation(call.prepare, call.renderer)

    async def _count_tokens(self, request: Request) -> Response:
        async with self._port.bodies.read(request.scope, request.receive) as body:
            count = await MessagesCall(self._preparer).count(body, origin_of(request.scope["state"]))
        return json_response({"input_tokens": count})
