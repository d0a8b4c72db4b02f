"""Faulty remote workers for tests. Each function below is a faulty behaviour for one connection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.frames import Answer, PageLayout, Status
from tests.exec.remote_kv.served_reservations import LAYOUT, PAGE_BYTES, PAGE_SIZE

HELLO_SIZE = len(frames.pack_hello(PageLayout(LAYOUT, PAGE_SIZE, PAGE_BYTES)))
Manner = Callable[["SickPeer", socket.socket], None]


class SickPeer:
    """A server with one behaviour per connection, in order. The last behaviour also serves all further connections.

    `asked` is set when a whole request has arrived. `num_connections` counts the connections so far.
    """

    def __init__(self, *manners: Manner) -> None:
        self._manners = manners
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
                manner = self._manners[min(self.num_connections, len(self._manners) - 1)]
                self.num_connections += 1
                with one:
                    one.settimeout(20)
                    manner(self, one)


def _exactly(of: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = of.recv(size - len(got))
        if not part:
            raise ConnectionError
        got += part
    return got


def _answer(payload_bytes: int, status: int = Status.OK) -> bytes:
    return struct.pack("<B7xQ", status, payload_bytes)


def _welcome(peer: SickPeer, one: socket.socket) -> None:
    _exactly(one, HELLO_SIZE)
    one.sendall(frames.pack_answer(Answer(Status.OK)))
    _exactly(one, frames.REQUEST_BYTES)
    peer.asked.set()


def _break_off(one: socket.socket) -> None:
    """Makes the next close() of the socket send a reset."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silent(peer: SickPeer, one: socket.socket) -> None:
    """Sends nothing at all."""
    peer.asked.set()
    peer.is_over.wait(60)


def silent_when_asked(peer: SickPeer, one: socket.socket) -> None:
    _welcome(peer, one)
    peer.is_over.wait(60)


def silent_in_its_answer(peer: SickPeer, one: socket.socket) -> None:
    _welcome(peer, one)
    one.sendall(_answer(2 * PAGE_BYTES) + bytes(PAGE_BYTES))
    peer.is_over.wait(60)


def drips(peer: SickPeer, one: socket.socket) -> None:
    _welcome(peer, one)
    for byte in _answer(2 * PAGE_BYTES) + bytes(2 * PAGE_BYTES):
        if peer.is_over.wait(0.02):
            return
        one.sendall(bytes((byte,)))


def drips_its_welcome(peer: SickPeer, one: socket.socket) -> None:
    peer.asked.set()
    for byte in _answer(1000, Status.LAYOUT) + b"x" * 1000:
        if peer.is_over.wait(0.02):
            return
        one.sendall(bytes((byte,)))


def says(answer: bytes, *, to_hello: bool = False) -> Manner:
    """Returns a behaviour that sends `answer` and ends the connection."""

    def manner(peer: SickPeer, one: socket.socket) -> None:
        if to_hello:
            _exactly(one, HELLO_SIZE)
        else:
            _welcome(peer, one)
        one.sendall(answer)

    return manner


def dies(peer: SickPeer, one: socket.socket) -> None:
    """Resets the connection in the middle of the pages, as the system does for a killed process."""
    _welcome(peer, one)
    one.sendall(_answer(2 * PAGE_BYTES) + bytes(PAGE_BYTES))
    _break_off(one)


def answers_once(payload: bytes, *, then_hears: bool, breaks_off: bool = False) -> Manner:
    """Returns a behaviour that answers one request.

    Args:
        payload: pages to send.
        then_hears: receive another request before the connection ends.
        breaks_off: end with a reset, as the system does for a killed process.
    """

    def manner(peer: SickPeer, one: socket.socket) -> None:
        _welcome(peer, one)
        one.sendall(_answer(len(payload)) + payload)
        if then_hears:
            _exactly(one, frames.REQUEST_BYTES)
        if breaks_off:
            _break_off(one)

    return manner


NEVER_TO_HELLO = says(b"HTTP/1.1 400 Bad Request\r\n\r\n", to_hello=True)
LONG_REFUSAL = says(_answer(1 << 40, Status.LAYOUT), to_hello=True)
WELCOME_WITH_MORE = says(_answer(5) + b"hello", to_hello=True)
TOO_LITTLE = says(_answer(PAGE_BYTES) + bytes(PAGE_BYTES))
TOO_MUCH = says(_answer(3 * PAGE_BYTES) + bytes(3 * PAGE_BYTES))
NO_STATUS = says(_answer(2 * PAGE_BYTES, 200) + bytes(2 * PAGE_BYTES))
HALF_A_HEAD = says(_answer(2 * PAGE_BYTES)[:7])
NOTHING = says(b"")
