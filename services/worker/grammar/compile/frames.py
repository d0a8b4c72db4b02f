"""Messages between the worker and its compiling processes over a stream socket: a length, then the bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_FRAME = 1 << 28  # largest number of bytes of a frame


def send_frame(link: socket.socket, body: bytes) -> None:
    link.sendall(_LENGTH.pack(len(body)))
    link.sendall(body)


def receive_frame(link: socket.socket) -> bytes:
    """Waits for a frame and returns its bytes.

    Raises:
        EOFError: the other process has closed the socket, or the frame is longer than MAX_FRAME.
        TimeoutError: the socket's timeout has passed.
    """
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if length > MAX_FRAME:
        raise EOFError(f"a frame has {length} bytes; the limit is {MAX_FRAME}")
    return _exactly(link, length)


def send_message(link: socket.socket, message: dict[str, Any]) -> None:
    send_frame(link, json.dumps(message).encode())


def receive_message(link: socket.socket) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(receive_frame(link))
    return message


def _exactly(link: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = link.recv(min(size - len(found), 1 << 20))
        if not part:
            raise EOFError("the other process has closed the socket")
        found += part
    return bytes(found)
