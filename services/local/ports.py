"""Finds free loopback ports for processes that are about to start.

Another program may take a port before the process starts. Two processes that use this module never get the same port: each claims
whole blocks of ports, one block at a time, and keeps them until it ends.
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
RANGE = range(10_000, 32_768)  # below the ports that Linux uses for outgoing connections, 32768 and above
BLOCKS = range(RANGE.start, RANGE.stop - 255, 256)  # first ports of the blocks, which have 256 ports each
_LOCK = threading.Lock()


def is_taken(port: int) -> bool:
    """Returns whether this process cannot listen on the loopback port: another process uses it, or it needs root privileges."""
    return why_not_listen(HOST, port) != ""


def why_not_listen(host: str, port: int) -> str:
    """Returns why a server cannot listen on the port, as the end of a sentence that begins with the port.

    Returns "" if it can, or if the address belongs to another machine; the server then reports the error itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            return "needs root privileges (ports below 1024)"
        except OSError as error:
            return "is taken (another `make run`?)" if error.errno == errno.EADDRINUSE else ""
    return ""


class _Ports:
    """The blocks that one process has claimed. A claim is a UDP socket on the block's first port, which stays free for TCP."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []
        # The ports of all claimed blocks: first the ports that take() has never tried, then the others in order of trial.
        self._ports: deque[int] = deque()

    def take(self, count: int, besides: Collection[int]) -> list[int]:
        with contextlib.ExitStack() as bound:
            found: list[int] = []
            tried = 0
            while len(found) < count:
                if tried == len(self._ports):
                    self._claim_block()
                port = self._ports.popleft()
                self._ports.append(port)
                tried += 1
                with contextlib.suppress(OSError):  # another program uses the port
                    if port not in besides:
                        bound.enter_context(contextlib.closing(socket.socket())).bind((HOST, port))
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
            f"no free block of ports on {HOST}: all {len(BLOCKS)} are claimed, {len(self._claims)} of them by this process"
        )


@functools.cache
def _ports_of(pid: int) -> _Ports:
    """Returns the blocks of the process with this id. A forked child has another id and therefore claims other blocks."""
    return _Ports()


def free_ports(count: int, besides: Collection[int] = ()) -> list[int]:
    """Returns different ports on which no program listens.

    The ports are below the range of outgoing connections, so a server that restarts finds its port free. Until this process ends,
    other processes that call this function do not get the ports. This process gets a port a second time only after it has got all
    other ports of its blocks.

    Args:
        count: number of ports.
        besides: ports that are not returned.

    Raises:
        RuntimeError: All blocks are claimed.
    """
    with _LOCK:
        return _ports_of(os.getpid()).take(count, besides)
