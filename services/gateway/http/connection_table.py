"""The open connections of a server, in the order in which they became idle.

If a connection exceeds the limit, the connection that has been idle longest is closed for it. A connection is idle until its
first complete request head, and between a response and the next complete head.
"""

from __future__ import annotations

import resource
from typing import Protocol

WANTED_DESCRIPTORS = 1 << 16  # soft limit of open files that a gateway sets, if the hard limit allows it
OTHER_DESCRIPTORS = 128  # open files besides connections of clients: remote services, Redis, logs, the event loop
RESERVE = 32  # connections above the limit, for health checks only


class Closable(Protocol):
    def close_idle(self) -> None:
        """Closes the connection, which has no unanswered request."""

    def close_after_answer(self) -> None:
        """Makes the response to the newest request the last one, and announces it in its head, unless that has been sent."""


def connections_allowed(descriptors: int) -> int:
    """Returns how many connections a process with this limit of open files serves. At least 1."""
    return max(descriptors - OTHER_DESCRIPTORS - RESERVE, 1)


def open_files_allowed() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def want_open_files() -> None:
    """Lifts the soft limit of open files to the hard limit, at most to WANTED_DESCRIPTORS.

    The soft limit is often 1,024, for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ConnectionTable:
    """The connections of one server, with a limit. Used by its event loop only.

    If no connection is idle, a connection above the limit is not admitted: only its health checks are served; others get 503.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed  # connections at once
        self.last_answers = False  # whether each connection ends with its next response
        self._open: set[Closable] = set()
        self._idle: dict[Closable, None] = {}  # in the order in which they became idle

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether more connections are open than the limit allows."""
        return len(self._open) > self._allowed

    def close_after_answers(self) -> None:
        """Makes each connection, current or later, end with its next response."""
        self.last_answers = True
        for connection in self._open:
            connection.close_after_answer()

    def add(self, connection: Closable) -> bool:
        """Adds a new connection, which is idle, and closes another idle one if the table is full.

        Returns:
            False if the table is still full.
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
        """Marks the connection as idle, because its request has been answered."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Closable) -> None:
        """Removes a closed connection. Does nothing if it is not in the table."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
