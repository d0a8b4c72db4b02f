"""How the program ends: its statuses, and what is said of an end that is not a good one."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Statuses for scripts; they are told in docs/reference/cli.md and do not change."""

    DONE = 0
    FAILED = 1  # the server refused, or failed
    USAGE = 2
    UNREACHABLE = 3  # no connection, or none that gives an answer in time
    CUT_OFF = 4  # the connection ended in mid-stream: what was printed is not the whole answer
    INTERRUPTED = 130  # Ctrl-C
    READER_GONE = 141  # whoever read what was printed has ended


class CommandFailed(Exception):
    """What ends a command. The message: one sentence that says what to do. passes: it may be well again in a while."""

    def __init__(self, status: Exit, message: str, passes: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.passes = passes or status is Exit.UNREACHABLE
