"""Free loopback ports for processes that are about to start."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket

HOST = "127.0.0.1"
RANGE = range(10_000, 32_768)  # Linux gives outgoing connections 32768 and above
BLOCKS = range(RANGE.start, RANGE.stop - 255, 256)  # of ports; the first one of each is whose claim it is


def is_taken(port: int) -> bool:
    """Whether something on this machine listens on the port already."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


class _Block:
    """Ports of one process. claim: a socket on the port before them, which is the block's as long as it is open."""

    def __init__(self, claim: socket.socket, ports: range) -> None:
        self._claim = claim
        self._num_ports = len(ports)
        self._ports = itertools.cycle(ports)

    def take(self, count: int) -> list[int]:
        """In turn, so that what was given out comes again as late as it can."""
        with contextlib.ExitStack() as held:
            found: list[int] = []
            for port in itertools.islice(self._ports, self._num_ports):
                with contextlib.suppress(OSError):  # somebody has it
                    held.enter_context(contextlib.closing(socket.socket())).bind((HOST, port))
                    found.append(port)
                if len(found) == count:
                    return found
        raise RuntimeError(f"no {count} ports of {HOST} are free among {self._num_ports}")


@functools.cache
def _block_of(pid: int) -> _Block:
    """Nobody else's while the process lives. Raises RuntimeError if all are claimed."""
    for first in random.sample(BLOCKS, len(BLOCKS)):
        claim = socket.socket()
        try:
            claim.bind((HOST, first))
        except OSError:
            claim.close()
        else:
            return _Block(claim, range(first + 1, first + BLOCKS.step))
    raise RuntimeError(f"{len(BLOCKS)} processes have claimed all ports of {HOST} from {RANGE.start} to {RANGE.stop - 1}")


def free_ports(count: int) -> list[int]:
    """`count` different ports that were free a moment ago, none of which an outgoing connection is given by default: a server
    that stops finds its port free again. No other process that asks here is given them while this one lives, and this one is
    not before it was given all others of its block. Raises RuntimeError if there are not as many."""
    return _block_of(os.getpid()).take(count)
