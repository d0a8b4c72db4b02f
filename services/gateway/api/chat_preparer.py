"""Who makes a chat of any API ready to be generated: api/openai does, for all of them."""

from __future__ import annotations

from typing import Any, Protocol

from services.gateway.request.generation import Plan, Prompt
from services.gateway.request.origin import Origin


class ChatPreparer(Protocol):
    """chat: a body of the chat completions API. Every method raises ApiError in the words of that API."""

    async def of_chat(self, chat: dict[str, Any], origin: Origin, prompt: Prompt | None = None) -> Plan:
        """prompt: what its messages have come to, where that is known."""

    async def count_of(self, chat: dict[str, Any], origin: Origin) -> int:
        """Tokens of its prompt."""
