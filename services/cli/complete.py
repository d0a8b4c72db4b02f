"""The command `rootstock complete`: continues a text."""

from __future__ import annotations

import argparse
import os
import sys

from rootstock_llm.services.cli.shared.answers import COMPLETIONS, print_answer
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.flags import add_server_flags, target_of
from rootstock_llm.services.cli.shared.requests import add_request_flags, fields_of, model_of
from rootstock_llm.services.cli.shared.server import Server


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="text to continue; default: the piped text")
    parser.add_argument("--stats", action="store_true", help="print tokens and times after the answer, on stderr")
    parser.add_argument("--json", action="store_true", help="print the answer as a line of JSON")
    add_request_flags(parser)
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the completion of one prompt. Raises CommandFailed."""
    if args.prompt is None and sys.stdin.isatty():
        raise CommandFailed(Exit.USAGE, "there is no prompt: give one as an argument or through a pipe.")
    prompt = args.prompt if args.prompt is not None else sys.stdin.read()
    if not prompt:
        raise CommandFailed(Exit.USAGE, "the prompt is empty: give one as an argument or through a pipe.")
    server = Server(target_of(args, os.environ))
    print_answer(server, COMPLETIONS, {"model": model_of(args, server), "prompt": prompt, **fields_of(args)}, args)
    return Exit.DONE
