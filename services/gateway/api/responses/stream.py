"""Streams the events of a background response: first its stored events, then new events while it is generated."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rootstock_llm.services.gateway.background.follow import Follow
from rootstock_llm.services.gateway.generation.bodies import ClientGone
from rootstock_llm.services.gateway.generation.errors import OPENAI, ApiError
from rootstock_llm.services.gateway.http.answer import SSE_HEADERS
from rootstock_llm.services.gateway.http.body import cut, watch_client
from rootstock_llm.services.gateway.store.state_store import StoreAway

UNREAD_S = 60.0  # seconds without reading after which a client's connection is closed; the client can resume the stream


class FollowedStream(Response):
    """Sends the events of a response to one client. The generation continues if the client disconnects."""

    def __init__(self, follow: Follow) -> None:
        # Response.__init__() is not called, because it would render a body.
        self._follow = follow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(content: bytes) -> None:
            """Sends content. Raises TimeoutError if the client does not read."""
            async with asyncio.timeout(UNREAD_S):
                await send({"type": "http.response.body", "body": content, "more_body": True})

        try:
            with watch_client(scope, receive):
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                if scope["method"] != "HEAD":
                    try:
                        await self._follow(write)
                    except StoreAway:
                        error = ApiError(503, "The store cannot be reached. Retry later.", code="store_unavailable")
                        await write(OPENAI.event_of(error, scope["state"]["request_id"]))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            cut(scope)  # the client has not read for UNREAD_S
        except ClientGone:
            return
