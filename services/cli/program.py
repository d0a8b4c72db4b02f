"""The program `rootstock`: runs a command line and returns the exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from rootstock_llm.services.cli.commands import build_parser
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.terminal import Terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Raises SystemExit after --help and for a wrong command line."""
    try:
        args = build_parser().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except CommandFailed as error:
        err = Terminal.of(sys.stderr)
        err.write(f"rootstock: {error}", "red")
        err.line()
        return error.status
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return Exit.READER_GONE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _discard_output()
        print(
            f"rootstock: the output cannot be written ({error.strerror}): free space, or write to another disk.", file=sys.stderr
        )
        return Exit.FAILED


def _discard_output() -> None:
    """Discards the rest of stdout. Without this call, the interpreter reports the fault again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
