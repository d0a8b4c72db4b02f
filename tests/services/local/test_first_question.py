"""Tests of the first question of `make run`: its form by the kind of model, the API key, and a failed server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rootstock_llm.services.local.demo import PROMPT, QUESTION, Endpoint, Kind, RequestFailed, RequestRefused, ask, curl

END_OF_STREAM = b"data: [DONE]\n\n"
CHOICES = {
    "/v1/chat/completions": {"delta": {"content": "42"}},
    "/v1/completions": {"text": "Paris"},
}


class Api(ThreadingHTTPServer):
    """Records requests. Streams one piece of text, or returns one embedding.

    Attributes:
        end: last bytes of a stream.
        status: status of every response.
    """

    end, status = END_OF_STREAM, 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any], str]] = []

    def endpoint(self, needs_key: bool = False) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self.server_port}", needs_key=needs_key)


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body, self.headers.get("authorization", "")))
        self.send_response(self.server.status)
        self.end_headers()
        if self.server.status != 200:
            self.wfile.write(b'{"error": {"message": "so it is"}}')
        elif choice := CHOICES.get(self.path):
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode() + self.server.end)
        else:
            self.wfile.write(b'{"data": [{"embedding": [1, 2, 3]}]}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("kind", "path", "fields", "answer"),
    [
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}, "42"),
        ("completion", "/v1/completions", {"prompt": PROMPT}, "Paris"),
        ("embedding", "/v1/embeddings", {"input": QUESTION}, "an embedding of 3 numbers"),
    ],
)
def test_first_question_uses_the_endpoint_of_the_model_kind(kind: Kind, path: str, fields: dict[str, Any], answer: str) -> None:
    written: list[str] = []
    with api() as server:
        assert ask(server.endpoint(), kind, "m", "the-key", written.append) == answer
    ((asked_path, body, authorization),) = server.asked
    assert (asked_path, authorization) == (path, "Bearer the-key") and "".join(written) == answer
    assert fields.items() <= body.items() and body["model"] == "m"


@pytest.mark.parametrize(
    "end", [b"", b'data: {"error": {"message": "gone"}}\n\n', b"data: {"], ids=["cut", "error", "half an event"]
)
def test_first_question_fails_when_the_stream_is_cut(end: bytes) -> None:
    with api() as server:
        server.end = end
        with pytest.raises(RequestFailed):
            ask(server.endpoint(), "chat", "m", "", lambda piece: None)
    with pytest.raises(RequestFailed):
        ask(server.endpoint(), "chat", "m", "", lambda piece: None)


@pytest.mark.parametrize(
    ("status", "error"), [(503, RequestFailed), (500, RequestFailed), (401, RequestRefused), (400, RequestRefused)]
)
def test_first_question_fails_for_status_5xx_and_is_refused_for_status_4xx(status: int, error: type[Exception]) -> None:
    with api() as server:
        server.status = status
        with pytest.raises(error, match=f"the gateway answered {status}: so it is"):
            ask(server.endpoint(), "chat", "m", "", lambda piece: None)


def test_curl_command_quotes_the_model_name_and_reads_the_api_key_from_the_shell() -> None:
    command = curl(Endpoint("http://127.0.0.1:1", needs_key=True), "chat", "it's")
    assert command.startswith('curl http://127.0.0.1:1/v1/chat/completions -H "authorization: Bearer $ROOTSTOCK_API_KEY" -H ')
    assert """{"model": "it'"'"'s", """ in command
