"""The open connections of a server, and their limit.

If a new connection exceeds the limit, the connection that has been idle longest is closed. A connection is idle until its first
complete request head, and between a response and the next complete head.
"""

from __future__ import annotations

import resource
from typing import Protocol

WANTED_DESCRIPTORS = 1 << 16  # soft limit of open files that a gateway sets, if the hard limit allows it
OTHER_DESCRIPTORS = 128  # open files besides connections of clients: remote services, Redis, logs, the event loop
RESERVE = 32  # connections above the limit, for health checks only


class Closable(Protocol):
    def close_idle(self) -> None:
        """Closes the connection. Called only while no request of the connection waits for its response."""

    def close_after_answer(self) -> None:
        """Closes the connection after the response to its newest request. No effect if the head of that response is sent."""


def connections_allowed(descriptors: int) -> int:
    """Returns the limit of connections of a process that may open `descriptors` files. At least 1."""
    return max(descriptors - OTHER_DESCRIPTORS - RESERVE, 1)


def open_files_allowed() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_file_limit() -> None:
    """Raises the soft limit of open files to the hard limit, at most to WANTED_DESCRIPTORS.

    Systems often set the soft limit to 1,024, because select() supports no more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ConnectionTable:
    """The connections of one server, with a limit. Used by its event loop only.

    If the table is full and no other connection is idle, a new connection is not admitted: it serves only health checks, and
    all other requests on it get 503.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed  # largest number of open connections
        self.last_answers = False  # whether each connection closes after its next response
        self._open: set[Closable] = set()
        self._idle: dict[Closable, None] = {}  # in the order in which they became idle

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether more connections are open than the limit allows."""
        return len(self._open) > self._allowed

    def close_after_answers(self) -> None:
        """Closes each open or later connection after its next response."""
        self.last_answers = True
        for connection in self._open:
            connection.close_after_answer()

    def add(self, connection: Closable) -> bool:
        """Adds a new connection as idle. If the table is full, closes the connection that has been idle longest.

        Returns:
            Whether the connection is admitted. False if the table is full and no other connection is idle.
        """
        self._open.add(connection)
        if self.full and self._idle:
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.close_idle()
        self._idle[connection] = None
        return not self.full

    def busy(self, connection: Closable) -> None:
        """Marks the connection as busy with a request."""
        self._idle.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """Marks the connection as idle after a response."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Closable) -> None:
        """Removes a closed connection. Does nothing if it is not in the table."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
