"""The command `rootstock models`: lists the served models."""

from __future__ import annotations

import argparse
import json
import os
import sys

from rootstock_llm.services.cli.shared.exits import Exit
from rootstock_llm.services.cli.shared.flags import add_server_flags, target_of
from rootstock_llm.services.cli.shared.requests import models_of
from rootstock_llm.services.cli.shared.server import Server
from rootstock_llm.services.cli.shared.terminal import Terminal


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print each model as a line of JSON, as the server sends it")
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a line for each model. Raises CommandFailed."""
    out = Terminal.of(sys.stdout)
    for model in models_of(Server(target_of(args, os.environ))):
        length = model.get("max_model_len")
        text = f"{model['id']}  {length:,} tokens" if isinstance(length, int) else model["id"]
        out.write(json.dumps(model) if args.json else text)
        out.line()
    return Exit.DONE
