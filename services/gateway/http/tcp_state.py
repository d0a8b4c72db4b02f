"""What the kernel knows of a connection that is not being read: a client's end is told to nobody else then."""

from __future__ import annotations

import asyncio
import socket
import sys

CLOSED = frozenset((7, 8))  # TCP_CLOSE after a reset, TCP_CLOSE_WAIT after the last byte; of Linux's tcp_states.h


def peer_has_closed(transport: asyncio.BaseTransport) -> bool:
    """False also where the kernel does not say. An end that waits behind bytes for which there is no window is not known yet."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or not sys.platform.startswith("linux"):
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in CLOSED
    except OSError:
        return True  # its descriptor is closed
