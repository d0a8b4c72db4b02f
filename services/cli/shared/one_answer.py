"""One answer on stdout, for a script or a look."""

from __future__ import annotations

import argparse
import json
import sys

from services.cli.shared.answers import Answer, ask
from services.cli.shared.exits import CommandFailed
from services.cli.shared.server import Server
from services.cli.shared.terminal import Terminal


def print_answer(server: Server, path: str, body: dict[str, object], args: argparse.Namespace) -> None:
    """On stdout, as it comes; with --json at its end, as one line. Raises CommandFailed."""
    answer, out, err = Answer(), Terminal.of(sys.stdout), Terminal.of(sys.stderr)

    def show(piece: str, is_reasoning: bool) -> None:
        if args.json or (is_reasoning and not out.is_tty):
            return
        out.write(piece, "dim" if is_reasoning else "")

    try:
        ask(server, path, body, answer, show)
    except (CommandFailed, KeyboardInterrupt):
        if answer.text and not args.json:
            out.line()
        raise
    out.line(json.dumps(answer.as_json(), ensure_ascii=False) if args.json else "")
    if args.stats:
        err.line(err.painted(answer.figures(), "dim"))
