"""Which connections a server has, and which of them has been idle longest: under pressure that one makes room.

A connection is idle from its begin to its first complete head, and from each answer to the next one.
"""

from __future__ import annotations

import resource
from typing import Protocol

WANTED_DESCRIPTORS = 1 << 16
OTHER_DESCRIPTORS = 128  # of a gateway: peers, Redis, logs, the event loop
RESERVE = 32  # of connections for who asks for the server's health alone, when all others are taken


class Closable(Protocol):
    def close_idle(self) -> None:
        """Closes the connection, which has no request."""

    def close_after_answer(self) -> None:
        """Its newest request is its last one, if its answer has not begun: that says so."""


def connections_allowed(descriptors: int) -> int:
    """How many connections a process may serve that may open so many files. At least one."""
    return max(descriptors - OTHER_DESCRIPTORS - RESERVE, 1)


def open_files_allowed() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def want_open_files() -> None:
    """As many as this process may have, up to WANTED_DESCRIPTORS: it is often begun with 1,024, for the sake of programs that
    know no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ConnectionTable:
    """allowed: connections at once; one more closes the one that has been idle longest. Where none is idle, it may ask for the
    server's health and gets 503 for all else. last_answers: whether each connection ends with its next answer."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.last_answers = False
        self._open: set[Closable] = set()
        self._idle: dict[Closable, None] = {}  # in the order in which they became so

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether more connections are open than are served."""
        return len(self._open) > self._allowed

    def close_after_answers(self) -> None:
        self.last_answers = True
        for connection in self._open:
            connection.close_after_answer()

    def add(self, connection: Closable) -> bool:
        """It has begun, and is idle. False: there was no room for it, and none could be made."""
        self._open.add(connection)
        if self.full and self._idle:
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.close_idle()
        self._idle[connection] = None
        return not self.full

    def busy(self, connection: Closable) -> None:
        """It has a request."""
        self._idle.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """Its request has been answered."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Closable) -> None:
        """It is closed. Twice does no harm."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
