"""The program `rootstock`: words in, an exit status out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from services.cli.commands import build_parser
from services.cli.shared.exits import CommandFailed, Exit
from services.cli.shared.terminal import Terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Exits by SystemExit on a wrong command line, and after --help."""
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return Exit.READER_GONE
