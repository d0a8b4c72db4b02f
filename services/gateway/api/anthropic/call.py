"""Prepares a request of the Messages API and makes its renderer."""

from __future__ import annotations

from rootstock_llm.services.gateway.api.anthropic.render import MessageRenderer
from rootstock_llm.services.gateway.api.anthropic.translation import chat_request, parse, prompt_request, thinks
from rootstock_llm.services.gateway.api.anthropic.types import CountTokensRequest, MessagesRequest
from rootstock_llm.services.gateway.api.chat import ChatPreparer
from rootstock_llm.services.gateway.api.request_body import parse_json
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import GenerationRequest
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts


class MessagesCall:
    """Prepares and renders one request. The caller calls prepare() once and then renderer(), or only count()."""

    def __init__(self, preparer: ChatPreparer) -> None:
        self._preparer = preparer
        self._shows_thinking: bool | None = None  # see MessageRenderer
        self._max_tokens = 0  # the client's limit of output tokens

    async def prepare(self, body: RequestBody, origin: Origin) -> GenerationRequest:
        """Parses the body, tokenizes its prompts and returns the generation request. Raises ApiError."""
        omits = self._preparer.omits_hosted_tools
        request = parse(MessagesRequest, parse_json(body.take()), origin.omit if omits else None)
        if thinks(request):
            self._shows_thinking = request.thinking is None or request.thinking.display != "omitted"
        self._max_tokens = request.max_tokens
        if request.stream:
            origin.stream()
        return await self._preparer.prepare(chat_request(request, omits), origin)

    async def count(self, body: RequestBody, origin: Origin) -> int:
        """Returns the number of tokens of the prompt. Raises ApiError."""
        omits = self._preparer.omits_hosted_tools
        request = parse(CountTokensRequest, parse_json(body.take()), origin.omit if omits else None)
        return await self._preparer.count(prompt_request(request, omits), origin)

    def renderer(self, request: RunningRequest, _created: int, model: str, _token_texts: TokenTexts) -> MessageRenderer:
        return MessageRenderer(request, model, self._shows_thinking, self._max_tokens)
