"""Faulty remote workers for tests. Each function below is a faulty behaviour for one connection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.frames import PageLayout, Response, Status
from tests.exec.remote_kv.served_reservations import LAYOUT, PAGE_BYTES, PAGE_SIZE

HELLO_SIZE = len(frames.pack_hello(PageLayout(LAYOUT, PAGE_SIZE, PAGE_BYTES)))
Behaviour = Callable[["SickPeer", socket.socket], None]


class SickPeer:
    """A server with one behaviour per connection, in order. The last behaviour also serves all further connections.

    `asked` is set when a whole request has arrived. `num_connections` counts the connections so far.
    """

    def __init__(self, *behaviours: Behaviour) -> None:
        self._behaviours = behaviours
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked, self.is_over = threading.Event(), threading.Event()
        self.num_connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> SickPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while not self.is_over.is_set():
            with suppress(OSError):
                one, _ = self._listener.accept()
                behaviour = self._behaviours[min(self.num_connections, len(self._behaviours) - 1)]
                self.num_connections += 1
                with one:
                    one.settimeout(20)
                    behaviour(self, one)


def _exactly(of: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = of.recv(size - len(got))
        if not part:
            raise ConnectionError
        got += part
    return got


def _response(payload_bytes: int, status: int = Status.OK) -> bytes:
    return struct.pack("<B7xQ", status, payload_bytes)


def _welcome(peer: SickPeer, one: socket.socket) -> None:
    _exactly(one, HELLO_SIZE)
    one.sendall(frames.pack_response(Response(Status.OK)))
    _exactly(one, frames.REQUEST_BYTES)
    peer.asked.set()


def _reset_on_close(one: socket.socket) -> None:
    """Makes the next close() of the socket send a reset."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silent(peer: SickPeer, one: socket.socket) -> None:
    """Sends nothing at all."""
    peer.asked.set()
    peer.is_over.wait(60)


def silent_after_the_request(peer: SickPeer, one: socket.socket) -> None:
    _welcome(peer, one)
    peer.is_over.wait(60)


def silent_in_the_response(peer: SickPeer, one: socket.socket) -> None:
    _welcome(peer, one)
    one.sendall(_response(2 * PAGE_BYTES) + bytes(PAGE_BYTES))
    peer.is_over.wait(60)


def slow_response(peer: SickPeer, one: socket.socket) -> None:
    _welcome(peer, one)
    for byte in _response(2 * PAGE_BYTES) + bytes(2 * PAGE_BYTES):
        if peer.is_over.wait(0.02):
            return
        one.sendall(bytes((byte,)))


def slow_hello_response(peer: SickPeer, one: socket.socket) -> None:
    peer.asked.set()
    for byte in _response(1000, Status.LAYOUT) + b"x" * 1000:
        if peer.is_over.wait(0.02):
            return
        one.sendall(bytes((byte,)))


def sends(response: bytes, *, to_hello: bool = False) -> Behaviour:
    """Returns a behaviour that sends `response` and ends the connection."""

    def behaviour(peer: SickPeer, one: socket.socket) -> None:
        if to_hello:
            _exactly(one, HELLO_SIZE)
        else:
            _welcome(peer, one)
        one.sendall(response)

    return behaviour


def resets_in_the_response(peer: SickPeer, one: socket.socket) -> None:
    """Resets the connection in the middle of the pages, as the system does for a killed process."""
    _welcome(peer, one)
    one.sendall(_response(2 * PAGE_BYTES) + bytes(PAGE_BYTES))
    _reset_on_close(one)


def responds_once(payload: bytes, *, reads_another: bool, resets: bool = False) -> Behaviour:
    """Returns a behaviour that responds to one request.

    Args:
        payload: pages to send.
        reads_another: whether to receive a second request before the connection ends.
        resets: whether to end with a reset, as the system does for a killed process.
    """

    def behaviour(peer: SickPeer, one: socket.socket) -> None:
        _welcome(peer, one)
        one.sendall(_response(len(payload)) + payload)
        if reads_another:
            _exactly(one, frames.REQUEST_BYTES)
        if resets:
            _reset_on_close(one)

    return behaviour


HTTP_TO_HELLO = sends(b"HTTP/1.1 400 Bad Request\r\n\r\n", to_hello=True)
LONG_REFUSAL = sends(_response(1 << 40, Status.LAYOUT), to_hello=True)
HELLO_RESPONSE_WITH_PAYLOAD = sends(_response(5) + b"hello", to_hello=True)
TOO_FEW_BYTES = sends(_response(PAGE_BYTES) + bytes(PAGE_BYTES))
TOO_MANY_BYTES = sends(_response(3 * PAGE_BYTES) + bytes(3 * PAGE_BYTES))
UNKNOWN_STATUS = sends(_response(2 * PAGE_BYTES, 200) + bytes(2 * PAGE_BYTES))
HALF_A_HEADER = sends(_response(2 * PAGE_BYTES)[:7])
NO_RESPONSE = sends(b"")
