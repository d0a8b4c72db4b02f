"""The commands of `rootstock` and their parser.

A command imports its libraries when it runs, so that `rootstock --help` needs only the standard library.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services import __version__
from rootstock_llm.services.cli import complete, completion, models
from rootstock_llm.services.cli.batch import command as batch
from rootstock_llm.services.cli.bench import flags as bench
from rootstock_llm.services.cli.chat import command as chat
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.status import command as status
from rootstock_llm.services.shared.flag_parser import FlagParser

DESCRIPTION = "Serves a model on this machine, and is a client of its gateway and of other servers with OpenAI's API."
EXITS = """\
exit status:
  0    done
  1    the server refused, or failed
  2    the command line is wrong
  3    the server cannot be reached
  4    an answer was cut off in the middle
  130  Ctrl-C
  141  the program that reads the output has ended"""

# Options of a parser that takes every word, also --help, as an argument, because no word begins with NUL.
NO_FLAGS: Mapping[str, Any] = {"prefix_chars": "\0", "add_help": False}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `rootstock`."""

    summary: str  # one line, without a capital letter at the start and without a full stop
    examples: tuple[str, ...]  # as typed in a shell; a test runs each of them
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    reads_flags: bool = True  # False: all words after the command go to the command's own parser


def _add_words(parser: argparse.ArgumentParser) -> None:
    text = "Model folder in Hugging Face layout, or a hub id; then flags, which `rootstock serve --help` lists."
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help=text)


def _serve(args: argparse.Namespace) -> int:
    from rootstock_llm.services.local.__main__ import serve

    return serve(args.words)


def _bench(args: argparse.Namespace) -> int:
    if fault := bench.settle(args):
        raise CommandFailed(Exit.USAGE, f"{fault}.")
    try:
        from rootstock_llm.services.cli.bench import command
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise CommandFailed(Exit.USAGE, "bench needs aiohttp: pip install aiohttp.") from None
    return command.run(args)


def _add_keys_flags(parser: argparse.ArgumentParser) -> None:
    from rootstock_llm.services.gateway.keys.flags import add_flags

    add_flags(parser)


def _keys(args: argparse.Namespace) -> int:
    from rootstock_llm.services.gateway.keys.__main__ import run

    return run(args)


def _add_control_flags(parser: argparse.ArgumentParser) -> None:
    from rootstock_llm.services.worker.control.flags import OPERATIONS, add_flags

    add_flags(parser)
    parser.epilog = f"{OPERATIONS}\n\n{parser.epilog}"


def _control(args: argparse.Namespace) -> int:
    from rootstock_llm.services.worker.control.__main__ import run

    return run(args)


def _add_sim_flags(parser: argparse.ArgumentParser) -> None:
    from rootstock_llm.services.sim.flags import ACTIONS, add_flags

    add_flags(parser)
    parser.epilog = f"{ACTIONS}\n\n{parser.epilog}"


def _sim(args: argparse.Namespace) -> int:
    if args.action == "fleet":
        from rootstock_llm.services.sim.fleet.__main__ import main as fleet

        return fleet(args.words)
    from rootstock_llm.services.sim.core.__main__ import main

    return main(args.words if args.action == "run" else [args.action, *args.words])


def _completion(args: argparse.Namespace) -> int:
    print(completion.script(args.shell, build_parser()), end="")
    return Exit.DONE


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "serve a model on this machine, with all services",
        ("rootstock serve models/demo --port 8000",),
        _add_words,
        _serve,
        reads_flags=False,
    ),
    "chat": Command(
        "talk with a model: a conversation at a terminal, or one answer",
        (
            'rootstock chat -m "What is 17 + 25?" --temperature 0',
            'echo "Count from 3 to 9." | rootstock chat --temperature 0 --json',
        ),
        chat.add_flags,
        chat.run,
    ),
    "complete": Command(
        "continue a text",
        ('rootstock complete "What is 12 + 30?" --temperature 0',),
        complete.add_flags,
        complete.run,
    ),
    "models": Command("list the served models", ("rootstock models",), models.add_flags, models.run),
    "status": Command(
        "show workers, queue, hit rates and tokens per second",
        ("rootstock status --once", "rootstock status --once --json"),
        status.add_flags,
        status.run,
    ),
    "bench": Command(
        "put load on a server and measure it",
        ("rootstock bench --num-requests 8 --concurrency 4 --output-len 16",),
        bench.add_flags,
        _bench,
    ),
    "batch": Command(
        "send many requests as a file, and fetch their results",
        ("rootstock batch submit requests.jsonl --wait", "rootstock batch list"),
        batch.add_flags,
        batch.run,
    ),
    "keys": Command(
        "make API keys for a gateway, and list the API keys in a file",
        ("rootstock keys new team-a --requests-per-minute 600", "rootstock keys list keys.json"),
        _add_keys_flags,
        _keys,
    ),
    "control": Command(
        "call an operation of one worker's control service",
        ("rootstock control GetInternalState", "rootstock control Pause in_place", "rootstock control Continue"),
        _add_control_flags,
        _control,
    ),
    "sim": Command(
        "run the scheduler or a fleet on a trace and a virtual clock",
        (
            "rootstock sim generate shared-prefix trace.jsonl",
            "rootstock sim run trace.jsonl --concurrency 128 --schedule-policy lpm",
            "rootstock sim fleet --workload chat --workers 4 --rate 20",
        ),
        _add_sim_flags,
        _sim,
    ),
    "completion": Command(
        "print a completion script for a shell",
        ("source <(rootstock completion bash)",),
        completion.add_flags,
        _completion,
    ),
}


def build_parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        "rootstock",
        description=DESCRIPTION,
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rootstock {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        examples = "\n".join(f"  {example}" for example in command.examples)
        subparser = subparsers.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # otherwise, --api-key KEY would mean --api-key-file KEY
            **({} if command.reads_flags else NO_FLAGS),
        )
        command.add_flags(subparser)
        subparser.set_defaults(run=command.run)
    return parser
