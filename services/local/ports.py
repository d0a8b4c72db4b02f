"""Free loopback ports for processes that are about to start.

Between a look and the start anybody may take a port that was free. Those who ask here do not take each other's: each process
claims a block of ports, another one once these are used up, and keeps them as long as it lives.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Collection

HOST = "127.0.0.1"
RANGE = range(10_000, 32_768)  # Linux gives outgoing connections 32768 and above
BLOCKS = range(RANGE.start, RANGE.stop - 255, 256)  # each begins there
_LOCK = threading.Lock()


def is_taken(port: int) -> bool:
    """Whether something on this machine listens on the port already."""
    return why_not_listen(HOST, port) != ""


def why_not_listen(host: str, port: int) -> str:
    """Returns why a server cannot listen on the port, as the end of a sentence about the port.

    "" means that it can, or that the address belongs to another machine, which the server itself reports.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            return "is for the system's administrator alone (ports below 1024)"
        except OSError as error:
            return "is taken (another `make run`?)" if error.errno == errno.EADDRINUSE else ""
    return ""


class _Ports:
    """Those of one process. A claim is a socket of UDP on a block's first port, which stays free for TCP."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []
        self._ports: deque[int] = deque()  # what was given the longest ago, or never, comes first

    def take(self, count: int, besides: Collection[int]) -> list[int]:
        with contextlib.ExitStack() as held:
            found: list[int] = []
            tried = 0
            while len(found) < count:
                if tried == len(self._ports):
                    self._claim_block()
                port = self._ports.popleft()
                self._ports.append(port)
                tried += 1
                with contextlib.suppress(OSError):  # somebody has it
                    if port not in besides:
                        held.enter_context(contextlib.closing(socket.socket())).bind((HOST, port))
                        found.append(port)
            return found

    def _claim_block(self) -> None:
        for first in random.sample(BLOCKS, len(BLOCKS)):
            claim = socket.socket(type=socket.SOCK_DGRAM)
            try:
                claim.bind((HOST, first))
            except OSError:
                claim.close()
            else:
                self._claims.append(claim)
                self._ports.extendleft(reversed(range(first, first + BLOCKS.step)))
                return
        raise RuntimeError(
            f"no block of ports of {HOST} is to be had: {len(BLOCKS)} are claimed, by this process {len(self._claims)}"
        )


@functools.cache
def _ports_of(pid: int) -> _Ports:
    """A child that was forked claims blocks of its own."""
    return _Ports()


def free_ports(count: int, besides: Collection[int] = ()) -> list[int]:
    """`count` different ports, none of them in `besides`, that were free a moment ago and that no outgoing connection is given by
    default: a server that stops finds its port free again. No other process that asks here is given them while this one lives,
    and this one gets them again as late as can be. Raises RuntimeError if there are not as many."""
    with _LOCK:
        return _ports_of(os.getpid()).take(count, besides)
