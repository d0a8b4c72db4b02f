"""The program `rootstock`: runs a command line and returns the exit status."""

from __future__ import annotations

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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter reports a broken pipe when it exits
        return Exit.READER_GONE
