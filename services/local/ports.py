"""Free loopback ports for processes that are about to start."""

from __future__ import annotations

import contextlib
import socket

HOST = "127.0.0.1"


def is_taken(port: int) -> bool:
    """Whether something on this machine listens on the port already."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def free_ports(count: int) -> list[int]:
    """`count` different ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
