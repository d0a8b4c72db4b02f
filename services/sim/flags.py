"""Adds the arguments of `rootstock sim`.

This module imports the standard library only, because the client builds its parser on any machine.
"""

from __future__ import annotations

import argparse

ACTIONS = """\
actions, each with its own --help:
  run TRACE             run the scheduler on a trace
  generate KIND FILE    write a trace
  fit SOURCE            fit a time model to measured steps
  fleet [TRACE]         run gateways and workers, and compare routing policies"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the argument `action`.

    All later arguments go to the action's own parser, because most of its flags are the worker's settings.
    """
    parser.add_argument("action", choices=("run", "generate", "fit", "fleet"), help="Action to run.")
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="Arguments and flags of the action.")
