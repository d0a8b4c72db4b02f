"""Exit statuses of the program, and the exception that ends a command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses for scripts. docs/reference/cli.md lists them, and they do not change."""

    DONE = 0
    FAILED = 1  # the server refused, or failed
    USAGE = 2
    UNREACHABLE = 3  # no connection, or no response within --timeout
    CUT_OFF = 4  # the stream ended early, so the printed answer is incomplete
    INTERRUPTED = 130  # Ctrl-C
    READER_GONE = 141  # the process that reads stdout has ended


class CommandFailed(Exception):
    """Ends a command. The message is one sentence with the remedy. `is_temporary`: a later attempt may succeed."""

    def __init__(self, status: Exit, message: str, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_temporary = is_temporary or status is Exit.UNREACHABLE
