"""Tests of clients that read slowly: they delay no other request, use little memory, and are disconnected at the deadline."""

from __future__ import annotations

import socket
from typing import Any

import orjson
import pytest

from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System, wait_until

# A response of about 1 MB: 500 tokens of two choices with 20 top logprobs each. The two sockets buffer a few kB of it.
LARGE = {"max_tokens": 500, "n": 2, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}


class SlowReader:
    """A client that sends a request. Each read_one() reads at most one byte of the response."""

    def __init__(self, system: System, body: dict[str, Any]) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", system.port))
        content = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **body})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)

    def read_one(self) -> None:
        self._socket.setblocking(False)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ConnectionError):
            return

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
def test_connection_of_a_slow_reader_is_closed_at_the_deadline(stream: bool) -> None:
    with System(
        request_timeout_s=4.0 if stream else 10.0, sse_comment_s=0.05
    ) as system:  # the whole response must be ready before its deadline
        server = system.gateway._http
        system.do(lambda: server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096))
        reader = SlowReader(system, {**LARGE, "stream": stream})

        def unread() -> int:
            return sum(each.transport.get_write_buffer_size() for each in list(server.server_state.connections))

        wait_until(lambda: unread() > 0, "unread output in the write buffer", 60)
        assert system.chat().status_code == 200
        buffered = unread()

        def has_ended() -> bool:
            reader.read_one()
            return not server.server_state.connections and system.gateway.service.idle

        wait_until(has_ended, "the end of the request", 60)
        assert system.chat().status_code == 200
        if stream:
            assert buffered < 1 << 18  # the request merges the output that the client has not read
        reader.close()
