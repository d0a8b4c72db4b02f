"""A line's request, answered by the endpoint that answers it over HTTP, without a connection: all that is checked there is
checked here, and the answer is the same to the byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message

from services.gateway.batches.line_results import Answer
from services.gateway.observe.access_log import AccessLog
from services.gateway.request.caller import Caller
from services.gateway.request.errors import OPENAI
from services.shared.limits import MAX_BATCH_RESULT_BYTES

Endpoint = Callable[[], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Told:
    """retry_after_s: 0 where the answer does not say. code: of an error, "" of none."""

    answer: Answer
    retry_after_s: int
    code: str


class LineCalls:
    """endpoints: by path. Of those, what a line may name is the caller's to say."""

    def __init__(self, endpoints: Mapping[str, Endpoint], access: AccessLog) -> None:
        self._endpoints = endpoints
        self._access = access

    async def call(self, path: str, body: bytes, caller: Caller, request_id: str) -> Told:
        """Cancelling it ends the request as a client does that leaves."""
        state = {"request_id": request_id, "form": OPENAI, "caller": caller, "key": caller.key}
        length = (b"content-length", b"%d" % len(body))
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": [length], "state": state}
        exchange, began = _Exchange(body), time.monotonic()
        try:
            await (await self._endpoints[path]())(scope, exchange.receive, exchange.send)
        finally:
            self._access.ended("batch", "POST", path, state, exchange.status, exchange.num_bytes, time.monotonic() - began)
        return exchange.told(request_id)


class _Exchange:
    """The two ends of one call. More of an answer than can be kept is not kept."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0  # until the response begins
        self.num_bytes = 0  # of the response's body
        self._headers: dict[bytes, bytes] = {}
        self._content = bytearray()

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()  # nobody leaves
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], dict(message["headers"])
            return
        body = message.get("body", b"")
        self.num_bytes += len(body)
        if len(self._content) <= MAX_BATCH_RESULT_BYTES:
            self._content += body

    def told(self, request_id: str) -> Told:
        answer = Answer(self.status or 500, bytes(self._content), request_id)
        return Told(answer, int(self._headers.get(b"retry-after", b"0")), _code(answer))


def _code(answer: Answer) -> str:
    if answer.status == 200:
        return ""
    code = orjson.loads(answer.body)["error"]["code"]
    return code if isinstance(code, str) else ""
