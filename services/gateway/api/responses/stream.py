"""Streams the events of a background response: first its stored events, then new events while it is generated."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rootstock_llm.services.gateway.background.follow import Follow
from rootstock_llm.services.gateway.generation.bodies import ClientGone
from rootstock_llm.services.gateway.generation.errors import OPENAI, ApiError
from rootstock_llm.services.gateway.http.answer import SSE_HEADERS, send_while_read
from rootstock_llm.services.gateway.http.body import watch_client
from rootstock_llm.services.gateway.store.state_store import StoreAway


class FollowedStream(Response):
    """Sends the events of a response to one client.

    The generation continues if the client disconnects or does not read. The client can then resume the stream.
    """

    def __init__(self, follow: Follow) -> None:
        # Response.__init__() is not called, because it would render a body.
        self._follow = follow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = send_while_read(scope, send)

        async def write(content: bytes) -> None:
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
        except ClientGone:
            return
