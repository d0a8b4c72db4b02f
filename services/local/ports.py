"""Free loopback ports for processes that are about to start."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
RANGE = range(10_000, 32_768)  # Linux gives outgoing connections 32768 and above
MOST_TAKEN = 500  # of the ports that are drawn


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
    """`count` different ports that were free a moment ago, none of which an outgoing connection is given by default: a server
    that stops finds its port free again."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in random.sample(RANGE, min(count + MOST_TAKEN, len(RANGE))):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):  # somebody has it
                each = held.enter_context(contextlib.closing(socket.socket()))
                each.bind((HOST, port))
                found.append(port)
        assert len(found) == count, "there are thousands of ports"
        return found
