"""The words of `rootstock sim`. Standard library only: the client adds them to its parser wherever it runs."""

from __future__ import annotations

import argparse

ACTIONS = """\
actions, each with its own --help:
  run TRACE             run the scheduler on a trace
  generate KIND FILE    write a trace
  fit SOURCE            fit a time model to measured steps
  fleet [TRACE]         run gateways and workers, and compare routing policies"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The words behind the action go to the action's own parser: most of its flags are the worker's settings."""
    parser.add_argument("action", choices=("run", "generate", "fit", "fleet"), help="the simulation, or the file that it needs")
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="arguments and flags of the action")
