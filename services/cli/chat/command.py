"""The command `rootstock chat`: prints one completion, or holds a conversation at a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from rootstock_llm.services.cli.chat.conversation import Conversation
from rootstock_llm.services.cli.chat.repl import Repl
from rootstock_llm.services.cli.shared.answers import CHAT, print_answer
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.flags import add_server_flags, target_of
from rootstock_llm.services.cli.shared.requests import add_request_flags, fields_of, model_of
from rootstock_llm.services.cli.shared.server import Server
from rootstock_llm.services.cli.shared.terminal import Terminal


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--message", metavar="TEXT", help="the user's message; default: the piped text, else a conversation"
    )
    parser.add_argument("-s", "--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--stats", action="store_true", help="print tokens and times after each answer, on stderr")
    parser.add_argument("--json", action="store_true", help="print one answer as a line of JSON")
    add_request_flags(parser)
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints one completion, or starts a conversation if stdin is a terminal. Raises CommandFailed."""
    server = Server(target_of(args, os.environ))
    if args.message is None and sys.stdin.isatty():
        if args.json:
            raise CommandFailed(Exit.USAGE, "--json needs a message: give it with -m or through a pipe.")
        return _converse(args, server)
    text = args.message if args.message is not None else sys.stdin.read()
    if not text.strip():
        raise CommandFailed(Exit.USAGE, "the message is empty: give one with -m or through a pipe.")
    conversation = Conversation(model_of(args, server), args.system, fields_of(args))
    print_answer(server, CHAT, conversation.body(text), args)
    return Exit.DONE


def _converse(args: argparse.Namespace, server: Server) -> int:
    with contextlib.suppress(ImportError):  # some systems lack readline; input() then has no line editing
        import readline

        readline.set_auto_history(True)
    conversation = Conversation(model_of(args, server), args.system, fields_of(args))
    return Repl(server, conversation, input, Terminal.of(sys.stdout), Terminal.of(sys.stderr), args.stats).run()
