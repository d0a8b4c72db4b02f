"""Tests of HTTP/1.0: responses have no chunks (RFC 9112, section 6.1), and the end of the connection ends a body."""

from __future__ import annotations

import re
import socket
from typing import Any

import orjson
import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import WAIT_S, System, chat_body

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(max_tokens=3),
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/messages": chat_body(max_tokens=3),
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 3}},
}
RANDOM_FIELDS = re.compile(
    r'"(?:id|created\w*|call_id|item_id|completed_at|e2e_latency)": ?(?:"[^"]*"|[\d.]+)'
)  # differs per request


def exchange(system: System, head: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Sends one request and reads until the server closes the connection. Returns status, headers and body."""
    with socket.create_connection(("127.0.0.1", system.port), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + b"\r\nhost: test\r\n" + b"content-length: %d\r\n\r\n" % len(body) + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    raw_head, _, content = received.partition(b"\r\n\r\n")
    status, *lines = raw_head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), content


def without_random_fields(text: bytes) -> str:
    return RANDOM_FIELDS.sub("", text.decode())


@pytest.mark.parametrize("keep", ["", "\r\nconnection: keep-alive"], ids=["plain", "keep-alive"])
@pytest.mark.parametrize("version", ["1.0", "0.9"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", REQUESTS)
def test_response_is_not_chunked_when_the_request_is_http_1_0(
    shared: System, path: str, stream: bool, version: str, keep: str
) -> None:
    body = {"model": MODEL, **REQUESTS[path], "stream": stream}
    newer = shared.post(path, body)
    status, headers, content = exchange(shared, f"POST {path} HTTP/{version}{keep}", orjson.dumps(body))
    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    assert headers["content-type"] == newer.headers["content-type"]
    assert ("content-length" in headers) == (not stream)
    assert without_random_fields(content) == without_random_fields(newer.content)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json", "/docs", "/nowhere", "/v1/models"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_routes_without_a_body_serve_http_1_0_requests(shared: System, path: str, method: str) -> None:
    newer = shared.request(method, path)
    status, headers, content = exchange(shared, f"{method} {path} HTTP/1.0")
    assert (status, headers["connection"]) == (newer.status_code, "close") and "transfer-encoding" not in headers
    assert bool(content) == bool(newer.content)


def test_failed_stream_ends_with_an_error_when_the_request_is_http_1_0(system: System) -> None:
    system.allow(1)
    body = orjson.dumps({"model": MODEL, **REQUESTS["/v1/completions"], "stream": True})
    with socket.create_connection(("127.0.0.1", system.port), timeout=WAIT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        received = connection.recv(65536)
        while b"data: " not in received:
            received += connection.recv(65536)
        system.do(lambda: system.worker.end_running(pb.ERROR_CODE_INTERNAL, "of a test"))
        received += b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.endswith(b"\n\n") and orjson.loads(received.split(b"data: ")[-1])["error"]["type"]


def test_server_sends_no_100_continue_when_the_request_is_http_1_0(shared: System) -> None:
    body = orjson.dumps({"model": MODEL, **REQUESTS["/v1/completions"]})
    head = "POST /v1/completions HTTP/1.0\r\nexpect: 100-continue"
    assert exchange(shared, head, body)[0] == 200
