"""A small OpenAI-compatible server for the tests of the client. As a process: python -m tests.services.cli.fake_server"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from aiohttp import web


class FakeServer:
    """A server in its own thread. A completion has `max_tokens` tokens; each event of a stream has `tokens_per_chunk` of them."""

    def __init__(self, tokens_per_chunk: int = 1, port: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []  # authorization header of each completion request
        # Behaviour for each of the next completion requests: an HTTP status, "not text" (an error body that is not UTF-8),
        # "truncated", "stream error", "no object" (an event that is a number), "hangs" or "ok". Later requests get "ok".
        self.behaviours: list[str] = []
        self.info: dict[str, Any] = {}  # body of /server_info
        self.models: Any = {"data": [{"id": "fake"}]}  # body of /v1/models
        self.client_closed = threading.Event()  # set when a client closes a stream early
        self.url = ""
        self._tokens_per_chunk = tokens_per_chunk
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/readiness", self._models)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0])

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        behaviour = self.behaviours.pop(0) if self.behaviours else "ok"
        if behaviour.isdigit():
            return web.json_response({"error": {"message": "no"}}, status=int(behaviour))
        if behaviour == "not text":
            return web.Response(status=502, body=b"\xff", content_type="text/html", charset="utf-8")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events: list[Any] = list(self._events(body, chat="chat" in request.path))
        if behaviour == "truncated":
            events = events[:2]
        elif behaviour == "stream error":
            events[1:] = [{"error": {"message": "lost", "type": "worker_lost"}}]
        elif behaviour == "no object":
            events[1:] = [5]
        if behaviour == "hangs":
            return await self._hang(response, events)
        raw = b"".join(b"data: " + orjson.dumps(e) + b"\n\n" for e in events)
        raw += b"data: [DONE]\n\n" if behaviour == "ok" else b""
        for piece in (raw[:37], raw[37:]):  # the cut is within an event
            await response.write(piece)
            await asyncio.sleep(0.002)
        return response

    async def _hang(self, response: web.StreamResponse, events: list[dict[str, Any]]) -> web.StreamResponse:
        """Sends the first events, and then comments until the client closes the connection."""
        await response.write(b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events[:3]))
        try:
            while True:
                await response.write(b": waiting\n\n")
                await asyncio.sleep(0.02)
        except ConnectionResetError:
            self.client_closed.set()
            raise

    def _events(self, body: dict[str, Any], chat: bool) -> Iterator[dict[str, Any]]:
        total, step = body.get("max_tokens", 4), self._tokens_per_chunk
        if chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for first in range(0, total, step):
            text = "".join(f" a{i}" for i in range(first, min(first + step, total)))
            reason = "length" if first + step >= total else None
            yield {"choices": [{"finish_reason": reason} | ({"delta": {"content": text}} if chat else {"text": text})]}
        usage = {"prompt_tokens": 10, "completion_tokens": total, "prompt_tokens_details": {"cached_tokens": 4}}
        yield {"choices": [], "usage": usage}


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(prog="fake_server")
    parser.add_argument("--port", type=int, default=8000)
    with FakeServer(port=parser.parse_args(argv).port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
